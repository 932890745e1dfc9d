"""Clients that leave, stop reading, stay idle, or wait long."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from llmd.wire.messages import AbortReq, BatchStrOutput, Finish, TextChunk
from tests.daemon import SLOW

from .conftest import World, wait_for


def endless(world: World) -> None:
    """Requests never end by themselves."""
    world.engine.pace = 0.01
    world.engine.hold_at = 399
    world.engine.script = lambda request: ["x"] * 400


def post(world: World, **body: Any) -> socket.socket:
    """Send a completion request and return its socket."""
    data = json.dumps({"model": "toy", "prompt": "hello", "max_tokens": 400, **body}).encode()
    raw = socket.create_connection(("127.0.0.1", int(world.url.rsplit(":", 1)[1])), timeout=10 * SLOW)
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    return raw


def until(raw: socket.socket, marker: bytes) -> bytes:
    """What comes until `marker` has come."""
    text = b""
    while marker not in text:
        data = raw.recv(65536)
        assert data, f"the connection ended after {text[-500:]!r}"
        text += data
    return text


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts(world: World, stream: bool) -> None:
    endless(world)
    raw = post(world, stream=stream)
    if stream:
        assert raw.recv(4096)
    else:
        wait_for(lambda: bool(world.engine.requests), 5)
    raw.close()
    abort = world.engine.wait_abort()
    assert abort.rid == world.engine.requests[0].rid
    assert abort.code == "client_disconnect"
    wait_for(lambda: world.outcomes() == {"client_disconnect": 1}, 2)
    wait_for(lambda: world.control.gauge("llmd_frontend_inflight") == 0, 5)


def test_a_disconnect_aborts_every_choice(world: World) -> None:
    endless(world)
    raw = post(world, stream=True, n=4)
    assert raw.recv(4096)
    raw.close()
    wait_for(lambda: len(world.engine.aborts) == 4, 2)
    assert {a.rid for a in world.engine.aborts} == {r.rid for r in world.engine.requests}


def test_a_stop_string_is_told_to_the_scheduler(world: World) -> None:
    world.engine.script = lambda request: None
    raw = post(world)
    wait_for(lambda: bool(world.engine.requests), 5)
    rid = world.engine.requests[0].rid
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 0, "ab", [97, 98, 99], Finish("stop", "c"))]))
    answer = until(raw, b"}}}")
    assert b'"text":"ab"' in answer
    assert b'"finish_reason":"stop"' in answer
    assert world.engine.wait_abort().code == "stop_string"
    raw.close()


def test_output_of_another_epoch_is_dropped(world: World) -> None:
    world.engine.script = lambda request: None
    raw = post(world)
    wait_for(lambda: bool(world.engine.requests), 5)
    rid = world.engine.requests[0].rid
    world.engine.say(BatchStrOutput(epoch=7, chunks=[TextChunk(rid, 0, "wrong", [1], Finish("stop"))]))
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 0, "ri", [1, 2])]))
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 0, "ri", [1, 2])]))
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 2, "ght", [3], Finish("stop"), at=2)]))
    assert b'"text":"right"' in until(raw, b"}}}")
    raw.close()
    wait_for(lambda: world.control.counter('llmd_wire_stale_messages_total{channel="tokenizer"}') == 1, 2)


def test_a_gap_in_the_output_is_asked_for_again_and_is_no_hole(world: World) -> None:
    world.engine.script = lambda request: None
    raw = post(world)
    wait_for(lambda: bool(world.engine.requests), 5)
    rid = world.engine.requests[0].rid
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 3, "x", [1], at=3)]))
    wait_for(lambda: bool(world.engine.resends), 5)
    assert world.engine.resends[0].request.rid == rid
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 0, "abcx", [7, 8, 9, 1], Finish("stop"))]))
    assert b'"text":"abcx"' in until(raw, b"}}}")
    raw.close()


def test_bad_frames_are_counted(world: World) -> None:
    world.engine._output.send(b"\xc1 not msgpack")
    wait_for(lambda: world.control.counter('llmd_wire_bad_frames_total{channel="tokenizer"}') == 1, 2)
    assert httpx.get(world.url + "/readyz").status_code == 200


def test_the_scheduler_s_abort_ends_a_stream_with_its_error(world: World) -> None:
    endless(world)
    raw = post(world, stream=True)
    assert raw.recv(4096)
    world.engine.say(AbortReq(rid=world.engine.requests[0].rid, epoch=1, code="request_timeout", message="it ran for 3 s"))
    text = until(raw, b"[DONE]")
    events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"] == {"message": "it ran for 3 s", "type": "server_error", "param": None, "code": "request_timeout"}
    assert 'finish_reason":"' not in text.decode()
    raw.close()
    wait_for(lambda: world.outcomes() == {"request_timeout": 1}, 2)


def test_a_silent_stream_is_pinged(make_world: Callable[..., World]) -> None:
    world = make_world(sse_ping=0.2).up()
    world.engine.script = lambda request: None
    raw = post(world, stream=True)
    assert until(raw, b": ping").startswith(b"HTTP/1.1 200 ")
    until(raw, b": ping")
    raw.close()
    world.engine.wait_abort()


def unread(world: World, **fields: Any) -> socket.socket:
    """A stream whose client does not read."""
    data = json.dumps({"model": "toy", "prompt": "slow", "max_tokens": 400, "stream": True, **fields}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", int(world.url.rsplit(":", 1)[1])))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    wait_for(lambda: bool(world.engine.requests), 5)
    return raw


def test_a_client_that_stops_reading_is_cut(make_world: Callable[..., World]) -> None:
    world = make_world(stream_write_timeout=1.0).up()
    world.engine.script = lambda request: ["y" * 2000] * 400 if request.input_ids[0] == ord("s") else ["x"] * 100
    world.engine.pace = 0.002
    raw = unread(world)
    answer = httpx.post(world.url + "/v1/completions", json={"model": "toy", "prompt": "fast", "max_tokens": 100})
    assert answer.json()["choices"][0]["text"] == "x" * 100
    wait_for(lambda: world.outcomes().get("slow_client") == 1, 8)
    wait_for(lambda: world.control.gauge("llmd_frontend_inflight") == 0, 3)
    raw.close()
    assert "Exception" not in world.stderr


def test_what_piles_up_for_a_client_that_does_not_read_is_bounded(make_world: Callable[..., World]) -> None:
    world = make_world(stream_write_timeout=3600.0).up()
    world.engine.script = lambda request: ["y" * 16000] * 4000
    world.engine.pace = 0.002
    before = psutil.Process(world.process.pid).memory_info().rss
    raw = unread(world)
    wait_for(lambda: world.outcomes().get("slow_client") == 1, 20)
    assert psutil.Process(world.process.pid).memory_info().rss - before < 20 * 2**20
    assert world.engine.wait_abort().code == "slow_client"
    raw.close()


def test_a_client_that_reads_again_gets_all_it_missed(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    pieces = [f"{i:04d}" * 500 for i in range(400)]  # more than the buffers between here and there hold
    world.engine.script = lambda request: pieces
    raw = unread(world, logprobs=1, max_tokens=401)
    wait_for(lambda: bool(world.engine.ended), 10)
    events = [json.loads(line[6:]) for line in until(raw, b"[DONE]").decode().splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "".join(pieces)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 400
    assert len(choices) < 400, "what waited was merged"
    raw.close()


def test_one_connection_serves_again_after_a_pause(world: World) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), timeout=5 * SLOW)
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "hello", "max_tokens": 4}))
        answer = connection.getresponse()
        assert json.loads(answer.read())["choices"][0]["text"] == "hell"
        assert answer.getheader("connection") is None
        time.sleep(0.3)
    connection.close()


def test_health_answers_while_a_long_prompt_is_tokenized(world: World) -> None:
    raw = post(world, prompt="lorem ipsum " * 80_000)
    worst = 0.0
    for _ in range(20):
        start = time.monotonic()
        assert httpx.get(world.url + "/livez").status_code == 200
        worst = max(worst, time.monotonic() - start)
    assert worst < 1.0 * SLOW
    until(raw, b"context_length_exceeded")
    raw.close()
