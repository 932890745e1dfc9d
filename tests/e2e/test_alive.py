"""Values out of range cost the request and nothing else: the same text afterwards, ready, and no process replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.daemon import SLOW, Daemon

CHAT = {"model": "dummy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
COMPLETION = {"model": "dummy", "prompt": "hello", "max_tokens": 8, "temperature": 0}

#: (body, status, param, code) of chat requests.
REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"model": "no-such-model"}, 404, "model", "model_not_found"),
    ({"temperature": 999999}, 400, "temperature", None),
    ({"temperature": -0.1}, 400, "temperature", None),
    ({"top_p": -1}, 400, "top_p", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"top_k": -7}, 400, "top_k", None),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", None),
    ({"stop": ""}, 400, "stop", None),
    ({"stop": ["x", ""]}, 400, "stop", None),
    ({"stop": [1]}, 400, "stop", None),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("alive"), config={"model": {"path": "dummy"}}, failpoints="").start() as daemon:
        yield daemon


@pytest.fixture
def alive(daemon: Daemon) -> Iterator[None]:
    text, pids = daemon.text(), {p.pid for p in daemon.children()}
    yield
    assert daemon.text() == text
    assert daemon.status_code("/readyz") == 200
    assert {p.pid for p in daemon.children()} == pids


def chat(daemon: Daemon, body: bytes | dict[str, Any]) -> httpx.Response:
    how: Any = {"content": body, "headers": {"Content-Type": "application/json"}} if isinstance(body, bytes) else {"json": body}
    return httpx.post(daemon.url + "/v1/chat/completions", timeout=30 * SLOW, **how)


@pytest.mark.usefixtures("alive")
def test_each_value_out_of_range_is_named(daemon: Daemon) -> None:
    for change, status, param, code in REFUSED:
        answer = chat(daemon, CHAT | change)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code), (change, answer.text)
    assert "dummy" in chat(daemon, CHAT | {"model": "no-such-model"}).json()["error"]["message"]
    assert daemon.complete(max_tokens=-5).json()["error"]["param"] == "max_tokens"


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e999", "Infinity"])
def test_numbers_that_json_does_not_have_are_refused(daemon: Daemon, number: str) -> None:
    answer = chat(daemon, f'{{"model":"dummy","messages":[{{"role":"user","content":"hi"}}],"temperature":{number}}}'.encode())
    assert answer.status_code == 400, answer.text


@pytest.mark.usefixtures("alive")
def test_what_is_without_bounds_is_refused_and_costs_no_memory(daemon: Daemon) -> None:
    frontend = psutil.Process(daemon.pid("frontend"))
    before = frontend.memory_info().rss
    many: list[tuple[dict[str, Any], str]] = [
        ({"n": 100_000}, "128"),
        ({"logit_bias": {str(id): 5 for id in range(200_000)}}, "65536"),
        ({"logit_bias": {str(id): 5 for id in range(2_000)}}, "1024"),
        ({"stop": ["x"] * 10_000}, "16"),
        ({"prompt": ["a"] * 100_000}, "256"),
    ]
    for change, limit in many:
        answer = httpx.post(daemon.url + "/v1/completions", json=COMPLETION | change, timeout=60)
        assert answer.status_code == 400 and limit in answer.json()["error"]["message"], answer.text
    for opening, closing in (("[", "]"), ('{"a":', "}"), ("[", "")):
        answer = httpx.post(daemon.url + "/v1/completions", content='{"prompt":' + opening * 100_000 + closing * 100_000 + "}", timeout=60)
        assert answer.status_code == 400 and "64" in answer.json()["error"]["message"], answer.text
    assert frontend.memory_info().rss - before < 100 * 2**20


@pytest.mark.usefixtures("alive")
def test_the_served_model_is_the_default_and_the_only_one(daemon: Daemon) -> None:
    answer = chat(daemon, {key: value for key, value in CHAT.items() if key != "model"})
    assert answer.status_code == 200 and answer.json()["model"] == "dummy"
    assert [model["id"] for model in httpx.get(daemon.url + "/v1/models").json()["data"]] == ["dummy"]


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("stop", ["l", ["o", "l"], None, []])
def test_every_legal_shape_of_stop(daemon: Daemon, stop: Any) -> None:
    answer = daemon.complete(stop=stop)
    assert answer.status_code == 200
    text = answer.json()["choices"][0]["text"]
    assert text == ("he" if stop else "hellohel")
