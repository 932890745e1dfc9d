"""The application on a real server in this process: faults of our own, and what a connection is like."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.frontend.access_log import AccessLog
from llmd.frontend.app import create_app
from llmd.frontend.engine_view import EngineView
from llmd.frontend.exchange import TRANSPORT
from llmd.frontend.runtime import Runtime
from llmd.frontend.server import FrontendServer, uvicorn_config
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter

from .test_state import BOOT


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
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(0.2)
    counts = {name.removeprefix("llmd_requests_total"): value for name, value in runtime.meter.snapshot().counters.items()}
    assert counts == {
        '{endpoint="/v1/models",outcome="ok"}': 1,
        '{endpoint="/v1/models/ID",outcome="not_found"}': 1,
        '{endpoint="unknown",outcome="not_found"}': 1,
        '{endpoint="unknown",outcome="invalid"}': 1,
        '{endpoint="/v1/chat/completions",outcome="rejected"}': 1,
        '{endpoint="/v1/chat/completions",outcome="invalid"}': 1,
        '{endpoint="/v1/completions",outcome="client_disconnect"}': 1,
    }
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
        for said in (b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /li"):
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
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 3)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
    runtime.manager.executor.shutdown()
