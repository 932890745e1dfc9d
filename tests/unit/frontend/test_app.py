"""The application on a real server in this process: faults of our own, and what a connection is like."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.frontend.access import Guard, KeyRing
from llmd.frontend.access_log import AccessLog
from llmd.frontend.app import create_app
from llmd.frontend.commands import farewell
from llmd.frontend.engine_view import EngineView
from llmd.frontend.exchange import TRANSPORT
from llmd.frontend.gate import Gate
from llmd.frontend.rates import RateLimits
from llmd.frontend.runtime import Runtime
from llmd.frontend.server import FrontendServer, HeadHolder, uvicorn_config
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter
from tests.daemon import SLOW

from .test_state import BOOT, view


class NoPort:
    def send(self, message: Any) -> None: ...


def make_runtime(tmp_path: Path) -> Runtime:
    view, meter = EngineView(BOOT, restarted=False), Meter()
    manager = TokenizerManager(0, view, NoPort(), meter)  # type: ignore[arg-type]
    return Runtime(BOOT, view, manager, meter, AccessLog(tmp_path / "access.log", role="f", exclude=(), as_json=True))


@contextlib.asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = FrontendServer(uvicorn_config(app, keep_alive=5, backlog=10))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 5)


async def test_a_fault_of_our_own_is_generic_outside_and_logged_inside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = make_runtime(tmp_path)

    def broken() -> None:
        raise ZeroDivisionError("secret detail")

    runtime.view.refusal = broken  # type: ignore[method-assign, assignment]
    async with served(create_app(runtime, nothing())) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    found = [r for r in caplog.records if r.exc_info and getattr(r, "request_id", None) == "abc"]
    assert len(found) == 1
    assert runtime.meter.snapshot().counters == {'llmd_requests_total{endpoint="/v1/completions",outcome="error"}': 1.0}
    runtime.manager.executor.shutdown()


async def test_every_request_under_v1_is_counted_once(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url, httpx.AsyncClient() as client:
        await client.get(url + "/v1/models")
        await client.get(url + "/v1/models/x")
        await client.get(url + "/v1/secret-path-of-a-client")
        await client.get(url + "/v1/completions")
        await client.get(url + "/livez")
        await client.post(url + "/v1/chat/completions", json={})
        await client.post(url + "/v1/chat/completions", content=b"{")
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        await client.options(url + "/v1/embeddings")
        await client.post(url + "/v1/tokenize", json={}, headers={"X-Request-Id": "x" * 200})
        for bad in (b"X: " + b"a" * 80_000, b"H st: x", b"Transfer-Encoding: chunked\r\n\r\nzz"):
            answer = await asyncio.to_thread(answer_to, url, b"POST /v1/detokenize?x=1 HTTP/1.1\r\nHost: localhost\r\n" + bad + b"\r\n\r\n")
            assert b"\r\nx-llmd-weights: " in answer and answer.count(b"connection: close") == 1, answer
        assert (await asyncio.to_thread(answer_to, url, b"no request at all\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        await until(lambda: sum(runtime.meter.snapshot().counters.values()) >= 12)
    counts = {name.removeprefix("llmd_requests_total"): value for name, value in runtime.meter.snapshot().counters.items()}
    assert counts == {
        '{endpoint="/v1/models",outcome="ok"}': 1,
        '{endpoint="/v1/models/ID",outcome="not_found"}': 1,
        '{endpoint="unknown",outcome="not_found"}': 1,
        '{endpoint="/v1/completions",outcome="invalid"}': 1,
        '{endpoint="/v1/embeddings",outcome="invalid"}': 1,
        '{endpoint="/v1/tokenize",outcome="invalid"}': 1,
        '{endpoint="/v1/detokenize",outcome="invalid"}': 3,
        '{endpoint="/v1/chat/completions",outcome="rejected"}': 1,
        '{endpoint="/v1/chat/completions",outcome="invalid"}': 1,
        '{endpoint="/v1/completions",outcome="client_disconnect"}': 1,
    }
    runtime.manager.executor.shutdown()


def answer_to(url: str, data: bytes) -> bytes:
    """All that comes back for bytes as they are, until the server closes."""
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=20 * SLOW) as raw:
        raw.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):  # the rest of what was sent was not read
            while piece := raw.recv(65536):
                found += piece
        return found


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/2.0\r\nHost: localhost", 505),
        (b"HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 200-ok", 417),
        (b"HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: gzip", 415),
        (b"HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: identity", 503),
    ],
)
async def test_what_is_not_spoken_here_is_refused_by_its_own_status(tmp_path: Path, head: bytes, status: int) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        answer = await asyncio.to_thread(answer_to, url, b"POST /v1/completions " + head + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert b'{"error":{"message":' in answer
    assert len([name for name in runtime.meter.snapshot().counters if name.startswith("llmd_requests_total")]) == 1
    runtime.manager.executor.shutdown()


async def test_connections_send_small_pieces_at_once() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        sock = scope[TRANSPORT].transport.get_extra_info("socket")
        body = json.dumps(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with served(app) as url, httpx.AsyncClient() as client:
        assert (await client.get(url)).json() == 1


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llmd.frontend.server.HEADERS_S", 0.2)
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        for said in (b"", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /li"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(said)
            answer = await asyncio.wait_for(reader.read(), 3)
            assert answer.startswith(b"HTTP/1.1 200" if said.endswith(b"li") else b"")
            writer.close()
    runtime.manager.executor.shutdown()


async def test_a_body_that_stops_coming_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llmd.frontend.body.BODY_IDLE_S", 0.2)
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 3)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
    runtime.manager.executor.shutdown()


async def spoken(url: str, said: bytes, *, eof: bool = False, within: float = 3) -> bytes:
    """All that comes back on a connection on which `said` was said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(said)
    if eof:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), within)
    finally:
        writer.close()


async def until(over: Callable[[], bool]) -> None:
    for _ in range(300):
        if over():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come")


PARTIAL = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"


async def test_a_request_whose_body_arrives_is_waited_for_by_a_drain_and_told_of_the_end(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        answer = asyncio.create_task(spoken(url, PARTIAL))
        await until(lambda: runtime.manager.inflight == 1)
        runtime.view.drain()
        late = asyncio.create_task(spoken(url, PARTIAL))
        for _ in range(20):  # of the loop that reads it
            await asyncio.sleep(0.005)
        assert runtime.manager.inflight == 1, "a drain does not wait for what comes during it"
        assert await farewell(runtime) == 0
        for said in (await answer, await late):
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 5" in head
            assert json.loads(body)["error"]["code"] == "shutting_down"
    runtime.manager.executor.shutdown()


def test_a_drain_lets_what_it_found_arriving_in() -> None:
    found = view(state="draining")
    assert found.refusal(admitted=True) is None
    assert found.refusal() is not None
    assert view(state="draining", engine_up=False).refusal(admitted=True) is not None


async def test_a_request_that_the_end_of_the_server_cancels_gets_the_envelope(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        answer = asyncio.create_task(spoken(url, PARTIAL, within=60))
        await until(lambda: runtime.manager.inflight == 1)
    head, _, body = (await answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert not [r for r in caplog.records if r.exc_info]
    runtime.manager.executor.shutdown()


async def test_an_http_1_0_client_gets_no_chunks(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    runtime = make_runtime(tmp_path)
    async with served(Gate(app, runtime, Guard(BOOT.args, {}, KeyRing(None, None), RateLimits(time.monotonic)))) as url:
        head, _, body = (await spoken(url, b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"one two"
        assert b"transfer-encoding" not in head.lower()
    async with served(create_app(runtime, nothing())) as url:
        head, _, body = (await spoken(url, b"GET /v1/models HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head
    runtime.manager.executor.shutdown()


class Sink:
    """A transport that keeps what is written, write by write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def test_a_head_goes_out_with_the_first_bytes_of_its_body_and_is_never_lost() -> None:
    sink = Sink()
    holder = HeadHolder(sink)  # type: ignore[arg-type]
    for data in (b"100 ", b"a"):
        holder.write(data)
    holder.hold()
    for data in (b"head ", b"body ", b"more"):
        holder.write(data)
    assert sink.written == [b"100 ", b"a", b"head body ", b"more"]
    holder.hold()
    holder.write(b"head")
    holder.write(b"")
    holder.hold()
    holder.write(b"head of a body that fails")
    holder.close()
    assert sink.written[4:] == [b"head", b"head of a body that fails"]
    assert sink.closed


async def test_a_head_request_is_answered(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url, httpx.AsyncClient(timeout=5 * SLOW) as client:
        for _ in range(2):
            answer = await client.head(url + "/livez")
            assert (answer.status_code, answer.content) == (200, b"")
    runtime.manager.executor.shutdown()


async def test_a_half_closed_client_gets_its_answer(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        assert (await spoken(url, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n", eof=True, within=2)).startswith(b"HTTP/1.1 200")
        assert await spoken(url, PARTIAL, eof=True, within=1) == b""
    runtime.manager.executor.shutdown()


async def test_headers_that_are_too_large_are_431(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    async with served(create_app(runtime, nothing())) as url:
        head, _, body = (await spoken(url, b"GET /livez HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    runtime.manager.executor.shutdown()
