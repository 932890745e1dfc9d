"""The whole chain answers: official client, streams, finish reasons, usage, disconnects, concurrency."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.daemon import HANGS, SLOW, Brake, Daemon, least, wait_for

DUMMY = {"model": {"path": "dummy"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[Daemon]:
    with Daemon(directory, config=DUMMY, failpoints=f"scheduler.step=delay(2ms);{Brake(directory, on=False).steps}").start() as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def brake(directory: Path) -> Iterator[Brake]:
    """The daemon's, on: what runs does not end by itself."""
    made = Brake(directory)
    yield made
    made.release()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def echo(prompt: str, length: int) -> str:
    return "".join(itertools.islice(itertools.cycle(prompt), length))


def test_the_official_client_gets_what_it_expects(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    plain = client.completions.create(model=model, prompt="abcde", max_tokens=12, temperature=0)
    assert plain.choices[0].text == echo("abcde", 12)
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None and plain.usage.completion_tokens == 12
    assert abs(plain.created - time.time()) < 5 * SLOW
    assert plain.object == "text_completion"
    chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    assert chat.object == "chat.completion" and chat.id != plain.id
    asked = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(asked)
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage == chat.usage
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")


def test_concurrent_streams_each_get_their_own_text(daemon: Daemon) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        prompt = f"stream {number} says "
        pieces = []
        async for chunk in await client.completions.create(model=daemon_model, prompt=prompt, max_tokens=64, temperature=0, stream=True):
            pieces.append(chunk.choices[0].text)
        return prompt, "".join(pieces)

    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, n) for n in range(64)))

    daemon_model = httpx.get(daemon.url + "/v1/models").json()["data"][0]["id"]
    for prompt, text in asyncio.run(all_of_them()):
        assert text == echo(prompt, 64)


@pytest.mark.usefixtures("brake")
def test_a_client_that_hangs_up_frees_its_slot(daemon: Daemon) -> None:
    before = daemon.metric('llmd_requests_total{endpoint="/v1/completions",outcome="client_disconnect"}')
    body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=30 * SLOW) as response:
        for _ in zip(range(3), response.iter_lines(), strict=False):
            pass
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 5)
    leaving = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30 * SLOW)
    leaving.request("POST", "/v1/completions", json.dumps(body | {"stream": False}))
    wait_for("it runs", lambda: daemon.requests() == (1, 0), 10)
    leaving.close()
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 5)
    name = 'llmd_requests_total{endpoint="/v1/completions",outcome="client_disconnect"}'
    wait_for("both are counted", lambda: daemon.metric(name) == before + 2, 5)
    settled(daemon)


def settled(daemon: Daemon) -> tuple[float, float]:
    """(tokens, requests) that have been counted, once nothing more is: two looks at them with two heartbeats between them are alike."""

    def same() -> tuple[float, float] | None:
        time.sleep(1.2)
        looks.append((daemon.metric("llmd_generation_tokens_total"), daemon.metric("llmd_requests_total")))
        return looks[-1] if looks[-1] == looks[-2] else None

    looks = [(-1.0, -1.0)]
    return wait_for("the counters settle", same, 20) or looks[-1]


@pytest.mark.usefixtures("brake")
def test_tokens_of_a_stream_count_as_they_come(daemon: Daemon) -> None:
    before = daemon.metric("llmd_generation_tokens_total")
    body = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=30 * SLOW) as response:
        lines = response.iter_lines()  # let go, it would close the stream
        next(lines)
        wait_for("they count while it runs", lambda: daemon.metric("llmd_generation_tokens_total") > before and daemon.requests() == (1, 0), 10)
        wait_for("status shows them", lambda: daemon.status()["throughput"]["generation_tokens_s"] > 0, 10)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 5)


def test_nothing_leaks(daemon: Daemon) -> None:
    daemon.text("some prompt", max_tokens=40)
    flushed = wait_for("flush succeeds", lambda: (r := daemon.admin("POST", "/v1/flush")).status_code == 200 and r, 5)
    assert flushed.json()
    kv = wait_for("no page in use", lambda: (k := daemon.status()["kv"])["pages_free"] == k["pages_total"] and k, 3)
    assert kv["pages_active"] == 0


@pytest.mark.usefixtures("brake")
def test_a_flush_is_refused_while_work_runs(daemon: Daemon) -> None:
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=30 * SLOW) as response:
        lines = response.iter_lines()  # kept: httpx closes the response when its iterator goes
        next(lines)
        refused = daemon.admin("POST", "/v1/flush")
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "busy"
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 3)


def test_drain_and_resume(daemon: Daemon) -> None:
    assert daemon.admin("POST", "/v1/drain").status_code == 200
    wait_for("draining", lambda: daemon.status_code("/readyz") == 503, 3)
    assert daemon.complete().json()["error"]["code"] == "draining"
    assert daemon.admin("POST", "/v1/resume").status_code == 200
    daemon.wait_ready(5)
    assert daemon.complete().status_code == 200


def test_every_answer_to_nonsense_is_an_error_envelope(daemon: Daemon) -> None:
    url = daemon.url
    answers = {
        404: httpx.get(url + "/no/such/path"),
        405: httpx.get(url + "/v1/completions"),
        400: httpx.post(url + "/v1/completions", content=b"{broken", headers={"content-type": "application/json"}),
        413: httpx.post(url + "/v1/completions", json={"prompt": "x" * 9_000_000}),
    }
    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_health_costs_no_generation(daemon: Daemon) -> None:
    before = settled(daemon)
    for _ in range(100):
        assert daemon.status_code("/readyz") == 200
    assert settled(daemon) == before


def test_health_is_quick_under_load(daemon: Daemon) -> None:
    """64 streams, and prompts that take long to tokenize."""
    over = threading.Event()

    def stream() -> None:
        while not over.is_set():
            assert list(daemon.stream("hello", max_tokens=100, ignore_eos=True))[-1]["choices"][0]["finish_reason"] == "length"

    def long_prompt() -> None:
        while not over.is_set():
            assert daemon.complete("word " * 40_000).status_code == 400  # 200 KB, more than the model takes

    with ThreadPoolExecutor(66) as pool:
        work = [pool.submit(task) for task in [stream] * 64 + [long_prompt] * 2]
        try:
            wait_for("all run", lambda: daemon.requests()[0] >= 32, 60)
            for _ in range(20):
                for path in ("/livez", "/readyz"):
                    assert least(lambda path=path: seconds_of(daemon.url + path), SLOW + 1) <= SLOW + 1, path  # type: ignore[misc]
        finally:
            over.set()
        for done in work:
            done.result(60 * SLOW)


def seconds_of(url: str) -> float:
    began = time.monotonic()
    assert httpx.get(url, timeout=30 * SLOW).status_code == 200
    return time.monotonic() - began


def test_helpers_are_small(daemon: Daemon) -> None:
    sizes = {p["role"]: p["rss_bytes"] for p in daemon.status()["processes"] if p["role"] != "scheduler"}
    assert set(sizes) == {"supervisor", "control", "frontend", "detokenizer"}
    assert all(0 < size < 150 * 2**20 for size in sizes.values()), sizes


def test_status_tells_what_the_contract_says(daemon: Daemon, tmp_path: Path) -> None:
    status = daemon.status()
    keys = {"state", "stage", "reason", "degraded", "epoch", "weights_version", "model", "uptime_s", "processes", "requests", "kv", "throughput", "failpoints"}
    assert keys <= set(status)
    assert status["state"] == "ready" and status["epoch"] == 1 and status["failpoints"] is True
    process_keys = {"role", "rank", "pid", "state", "restarts", "uptime_s", "heartbeat_age_s", "rss_bytes", "last_exit"}
    assert all(process_keys <= set(p) for p in status["processes"])


@pytest.mark.parametrize("text", ["x", " ", "hello world ", "世"])
def test_a_prompt_of_megabytes_costs_nobody_else_anything(daemon: Daemon, text: str) -> None:
    pid = daemon.pid("frontend")
    for path, body in (
        ("/v1/completions", {"prompt": text * (4_000_000 // len(text.encode()))}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * (4_000_000 // len(text.encode()))}]}),
    ):
        answer = httpx.post(daemon.url + path, json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert daemon.pid("frontend") == pid


def test_more_connections_than_descriptors_are_no_hang(tmp_path: Path) -> None:
    config = DUMMY | {"supervision": {"helper_timeout": HANGS}}
    with Daemon(tmp_path, config=config, failpoints="").start() as small:
        pid = small.pid("frontend")
        psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE, (100, 100))
        idle = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(150)]
        time.sleep(3 + SLOW)  # longer than a frontend that hangs would live
        for connection in idle:
            connection.close()
        wait_for("an answer", lambda: small.status_code("/livez") == 200, 10)
        assert small.pid("frontend") == pid
        assert small.stop() == 0
