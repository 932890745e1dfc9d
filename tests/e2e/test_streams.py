"""What a stream brings, joined, is what the whole answer is: characters, stops, offsets, ends, and usage, on one daemon that echoes."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW, Daemon, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EOS = 257
#: A face of four bytes, an ideograph of three, a family of five characters that are drawn as one, a flag of two.
CHARACTERS = "\U0001f600世\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1fa\U0001f1f8."


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {"model": {"path": "dummy"}, "scheduler": {"max_queued_requests": 1000}}
    with Daemon(tmp_path_factory.mktemp("streams"), config=config, failpoints="").start() as running:
        pids = {process.pid for process in running.children()}
        yield running
        assert {process.pid for process in running.children()} == pids


def echo(prompt: str, length: int) -> str:
    return "".join(itertools.islice(itertools.cycle(prompt), length))


def pieces(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def asked(path: str, prompt: str | list[int]) -> dict[str, Any]:
    return {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}], "prompt": None}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_characters_come_whole_however_many_tokens_they_are(daemon: Daemon, path: str) -> None:
    size = len(CHARACTERS.encode())
    events = list(daemon.stream(path=path, max_tokens=size, **asked(path, CHARACTERS)))
    texts = [pieces(event) for event in events]
    assert "".join(texts) == CHARACTERS
    assert not any("\ufffd" in text for text in texts)
    assert sum(map(bool, texts)) <= len(CHARACTERS)
    cut = list(daemon.stream(path=path, max_tokens=2, **asked(path, CHARACTERS)))
    assert "".join(map(pieces, cut)) == "\ufffd", "only what is cut in the middle may come so"


def test_each_token_of_a_split_character_has_its_logprob_and_its_byte(daemon: Daemon) -> None:
    wish = {"messages": [{"role": "user", "content": CHARACTERS}], "prompt": None, "logprobs": True, "max_tokens": len(CHARACTERS.encode())}
    entries = []
    for event in daemon.stream(path=CHAT, **wish):
        shown = event["choices"][0]["logprobs"]
        entries += shown["content"] if shown else []
    assert [bytes(entry["bytes"]) for entry in entries] == [bytes([byte]) for byte in CHARACTERS.encode()]
    whole = httpx.post(daemon.url + CHAT, json=wish | {"temperature": 0}).json()["choices"][0]
    assert whole["message"]["content"] == CHARACTERS
    assert whole["logprobs"]["content"] == entries


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
def test_text_ends_before_the_first_stop_however_it_is_cut(daemon: Daemon, n: int, kind: str) -> None:
    prompt = "one two three four "
    path = CHAT if kind == "chat" else TEXT
    wish: dict[str, Any] = asked(path, list(prompt.encode()) if kind == "ids" else prompt) | {"n": n, "max_tokens": 60}
    for stop in (["three"], ["two three f", "two"], ["wo t", "two three"], ["o t", "two three fi"], ["never", "r o"], ["eee", "ee"]):
        whole = echo(prompt, 60)
        expected = whole[: min(at for s in stop if (at := whole.find(s)) >= 0)]
        answer = httpx.post(daemon.url + path, json=wish | {"stop": stop, "temperature": 0}).json()
        texts = [c["message"]["content"] if path == CHAT else c["text"] for c in answer["choices"]]
        assert texts == [expected] * n
        joined, reasons = [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
        for event in daemon.stream(path=path, stop=stop, **wish):
            index, reason = event["choices"][0]["index"], event["choices"][0]["finish_reason"]
            joined[index] += pieces(event)
            reasons[index] += [reason] if reason else []
        assert joined == [expected] * n
        assert reasons == [["stop"]] * n


def test_tokens_logprobs_and_usage_end_with_the_stop_that_ended_the_text(daemon: Daemon) -> None:
    """The dummy's tokens are bytes: what it echoes of "xabcd" has "cd" complete while "abcdef" may still come true."""
    stop = ["cd", "abcdef"]
    for prompt, budget, least, shown, text, tokens, reason in (
        ("xabcdX", 20, 0, False, "xab", 5, "stop"),
        ("xabcdX", 20, 0, True, "xabcd", 5, "stop"),
        ("xabcdef", 20, 0, False, "x", 7, "stop"),
        ("xabcdef", 20, 0, True, "xabcdef", 7, "stop"),
        ("xabcdef", 5, 0, False, "xab", 5, "stop"),
        ("xabcde</s>", 20, 0, False, "xab", 5, "stop"),
        ("xabcdX", 11, 5, False, "xabcdXxab", 11, "stop"),
        ("xabcdX", 10, 5, False, "xabcdXxabc", 10, "length"),
    ):
        wish = {"stop": stop, "include_stop_str_in_output": shown, "min_tokens": least, "max_tokens": budget, "logprobs": 1, "n": 2, "echo": True}
        whole = daemon.complete(prompt, **wish).json()
        events = list(daemon.stream(prompt, **wish, stream_options={"include_usage": True}))
        asked_for = len(prompt) if "<" not in prompt else len(prompt) - 3
        assert whole["usage"] == events[-1]["usage"] and whole["usage"]["completion_tokens"] == 2 * tokens
        for choice in whole["choices"]:
            own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == choice["index"]]
            assert (choice["text"], choice["finish_reason"]) == (prompt + text, reason)
            assert "".join(piece["text"] for piece in own) == choice["text"]
            assert [piece["finish_reason"] for piece in own if piece["finish_reason"]] == [reason]
            joined = [token for piece in own if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
            assert joined == choice["logprobs"]["tokens"] and len(joined) == asked_for + tokens
        params = {"stop": stop, "no_stop_trim": shown, "min_new_tokens": least, "max_new_tokens": budget, "temperature": 0}
        native = httpx.post(daemon.url + "/generate", json={"text": prompt, "sampling_params": params, "return_logprob": True}).json()
        assert (native["text"], len(native["output_ids"]), native["meta_info"]["completion_tokens"]) == (text, tokens, tokens)
        assert len(native["meta_info"]["output_token_logprobs"]) == tokens
        assert native["meta_info"]["finish_reason"]["type"] == reason


def test_the_stop_may_be_shown(daemon: Daemon) -> None:
    whole = daemon.complete("one two three ", stop="two", max_tokens=40, include_stop_str_in_output=True).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("one two", "stop")
    assert "".join(map(pieces, daemon.stream("one two three ", stop="two", max_tokens=40, include_stop_str_in_output=True))) == "one two"


def test_a_stop_that_never_comes_costs_no_empty_chunk(daemon: Daemon) -> None:
    events = list(daemon.stream(path=CHAT, stop=["zzzz-never"], max_tokens=40, **asked(CHAT, "hello zz and zzzz more")))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == echo("hello zz and zzzz more", 40)


def test_echo_with_logprobs_has_the_same_offsets_streamed(daemon: Daemon) -> None:
    wish = {"echo": True, "logprobs": 1, "max_tokens": 6}
    whole = daemon.complete("héllo \U0001f600", **wish).json()["choices"][0]
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for event in daemon.stream("héllo \U0001f600", **wish):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole["logprobs"]
    data = ("héllo \U0001f600".encode() * 2)[: len("héllo \U0001f600".encode()) + 6]
    assert joined["text_offset"] == [len(data[:i].decode(errors="ignore")) for i in range(len(data))]
    assert [value is None for value in joined["token_logprobs"]] == [True] + [False] * (len(data) - 1)
    assert whole["text"] == data.decode(errors="replace")


def test_nothing_to_generate_is_an_answer(daemon: Daemon) -> None:
    answer = daemon.complete("hello", max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("hello", "length", 0)
    assert len(choice["logprobs"]["tokens"]) == 5


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_ends_usage_and_names(daemon: Daemon, path: str) -> None:
    for text, budget, reason, tokens in (("abc</s>", 9, "stop", 4), ("abcdefgh", 3, "length", 3)):
        prompt = asked(path, text)
        body = prompt | {"max_tokens": budget, "temperature": 0}
        whole = httpx.post(daemon.url + path, json=body).json()
        events = list(daemon.stream(path=path, max_tokens=budget, stream_options={"include_usage": True}, **prompt))
        assert whole["object"] == ("chat.completion" if path == CHAT else "text_completion")
        assert {event["object"] for event in events} == {"chat.completion.chunk" if path == CHAT else "text_completion"}
        assert len({event["id"] for event in events}) == 1 and events[0]["id"] != whole["id"]
        assert whole["choices"][0]["finish_reason"] == reason
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"] and e["choices"][0]["finish_reason"]] == [reason]
        assert events[-1]["choices"] == []
        assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == tokens
        assert whole["usage"]["prompt_tokens"] == (4 if "<" in text else 8)


def test_every_prompt_of_a_list_is_answered_in_its_place(daemon: Daemon) -> None:
    answer = daemon.complete(prompt=["ab", "cd", "ef"], n=2, temperature=0.7, seed=1).json()
    assert sorted(choice["index"] for choice in answer["choices"]) == list(range(6))
    for choice in answer["choices"]:
        assert choice["text"] == echo(["ab", "cd", "ef"][choice["index"] // 2], 8)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 48)
    ids = daemon.complete(prompt=[[65, 66], [67]]).json()["choices"]
    assert [choice["text"] for choice in ids] == ["ABABABAB", "CCCCCCCC"]
    refused = daemon.complete(prompt=[[65, 66], [999]])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 5)


@pytest.mark.parametrize("length", [333, 334, 335])
def test_prompts_of_many_byte_characters_of_any_length(daemon: Daemon, length: int) -> None:
    assert daemon.text("世" * length, max_tokens=9) == "世世世"


async def _one(client: httpx.AsyncClient, number: int) -> None:
    """A short stream, with a budget of its own, that every third time ends by a stop on its last token."""
    budget, prompt = number % 20 + 1, f"{number:03d} and on and on;"
    stop = echo(prompt, budget)[-1] if number % 3 == 0 else None
    expected = echo(prompt, budget)
    at = expected.find(stop) if stop else -1
    body = {"prompt": prompt, "max_tokens": budget, "temperature": 0, "stream": True, "stop": stop}
    answer = await client.post(TEXT, json=body)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop" if at >= 0 else "length"]
    assert choices[-1]["finish_reason"]
    assert "".join(choice["text"] for choice in choices) == (expected[:at] if at >= 0 else expected)


def test_six_hundred_streams_at_once_end_once_each_and_leave_nothing(daemon: Daemon) -> None:
    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=600)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=100, limits=limits) as client:
            slow = [_long(client, n) for n in range(10)]
            await asyncio.gather(*slow, *(_one(client, number) for number in range(600)))

    asyncio.run(all_of_them())
    wait_for("the detokenizer has forgotten all", lambda: daemon.metric("llmd_detokenizer_states") == 0, 10)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 5)


async def _long(client: httpx.AsyncClient, number: int) -> None:
    prompt = f"long {number} "
    answer = await client.post(TEXT, json={"prompt": prompt, "max_tokens": 1500, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == echo(prompt, 1500)


def test_connections_are_kept_for_the_next_request_until_a_drain(daemon: Daemon) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30 * SLOW)

    def ask() -> http.client.HTTPResponse:
        connection.request("POST", TEXT, json.dumps({"prompt": "hello", "max_tokens": 3}))
        answer = connection.getresponse()
        answer.read()
        return answer

    assert ask().getheader("connection") is None
    local = connection.sock.getsockname()
    assert ask().status == 200 and connection.sock.getsockname() == local
    assert daemon.admin("POST", "/v1/drain").status_code == 200
    wait_for("draining", lambda: daemon.status_code("/readyz") == 503, 5)
    assert ask().getheader("connection") == "close"
    assert daemon.admin("POST", "/v1/resume").status_code == 200
    daemon.wait_ready(10)
    connection.close()


def test_a_value_that_is_wrong_is_a_status_even_where_a_stream_was_asked_for(daemon: Daemon) -> None:
    for field in ({"n": 0}, {"max_tokens": 10**9}, {"prompt": "x" * 100_000}, {"regex": "a"}):
        answer = daemon.complete(stream=True, **field)
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/json", answer.text
