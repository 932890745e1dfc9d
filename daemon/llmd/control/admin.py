"""The admin plane: REST on a unix socket, in control's own loop. Reads come from what control knows, changes are operations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from llmd.control import admin_socket, configuration, exposition, peer, requests, status
from llmd.control.core import Core
from llmd.control.operations import WAITING_VERBS, Operation, Operations
from llmd.control.status import Rates
from llmd.control.verbs import VERBS
from llmd.errors import RequestError, envelope

log = logging.getLogger("llmd.control")

#: Bytes of the longest request body.
MAX_BODY = 2**20

#: Characters of a reason that are kept.
MAX_REASON = 500

#: Headers that only a browser sends. A web page must not reach this plane.
_BROWSER_HEADERS = (b"origin", b"referer", b"sec-fetch-")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class AdminServer:
    """The socket and the server on it."""

    def __init__(self, core: Core, operations: Operations, rates: Rates) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._core = core
        self._app = build(core, operations, rates)
        self._socket: socket.socket | None = None
        self._server: _Server | None = None

    def bind(self) -> None:
        """Take the socket. Raises ResourceError."""
        args = self._core.boot.args.admin
        path = Path(args.socket) if args.socket else self._core.boot.ports.admin_socket
        self._socket = admin_socket.bind(path, args.group, again=self._core.resumed)

    async def run(self) -> None:
        """Serve, for ever."""
        assert self._socket is not None, "bind comes first"
        config = uvicorn.Config(
            refuse_browsers(self._app), http=peer.PeerProtocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=30
        )
        self._server = _Server(config)
        await self._server.serve(sockets=[self._socket])

    def close(self) -> None:
        """Stop listening. The socket file stays, so that a caller is refused rather than told that nothing is there."""
        for server in getattr(self._server, "servers", []):
            server.close()
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """Signals are control's own, and so is its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """uvicorn would look ten times a second whether it shall exit; nobody asks that of this one. A tick renews the Date header."""
        while not await self.on_tick(0):  # noqa: ASYNC110
            await asyncio.sleep(1.0)


def build(core: Core, operations: Operations, rates: Rates) -> FastAPI:
    """The application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_reads(app, core, operations, rates)
    _add_changes(app, operations)
    _add_errors(app)
    return app


def _add_reads(app: FastAPI, core: Core, operations: Operations, rates: Rates) -> None:
    """What is read comes from control's picture, never from a rank."""

    @app.get("/v1/status")
    async def get_status() -> Response:
        return _json(status.status(core, rates))

    @app.get("/v1/processes")
    async def get_processes() -> Response:
        return _json({"processes": status.processes(core)})

    @app.get("/v1/kv")
    async def get_kv() -> Response:
        return _json(requests.kv(core))

    @app.get("/v1/requests")
    async def get_requests() -> Response:
        return _json(requests.requests(core))

    @app.get("/v1/config")
    async def get_config() -> Response:
        return _json(configuration.config(core))

    @app.get("/v1/weights")
    async def get_weights() -> Response:
        return _json(status.weights(core))

    @app.get("/v1/operations")
    async def get_operations() -> Response:
        return _json({"operations": operations.newest_first()})

    @app.get("/v1/operations/{number}")
    async def get_operation(number: str) -> Response:
        operation = operations.get(number)
        if operation is None:
            raise RequestError("there is no such operation", code="not_found")
        return _json(operation)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(core.metrics_text, media_type=exposition.CONTENT_TYPE)


def _add_changes(app: FastAPI, operations: Operations) -> None:
    """Each change is an operation, whichever path it came by."""

    async def change(request: Request, verb: str, raw: dict[str, Any]) -> Response:
        reason = _text(raw.pop("reason", ""), "reason")[:MAX_REASON]
        work = asyncio.ensure_future(operations.run(verb, raw, peer.of(request.scope), reason))
        if verb in WAITING_VERBS:
            await _while_connected(request, work)
            operations.end(work, "the caller hung up")
        return _json(await work)

    @app.post("/v1/operations")
    async def post_operation(request: Request) -> Response:
        body = await _body(request)
        unknown = body.keys() - {"verb", "target", "params", "reason"}
        if unknown:
            raise RequestError(f"{min(unknown)}: not a field of an operation", param=min(unknown))
        params = body.get("params") or {}
        if not isinstance(params, dict):
            raise RequestError("params: not an object", param="params")
        target = {"target": body["target"]} if body.get("target") is not None else {}
        return await change(request, _text(body.get("verb"), "verb"), {**params, **target, "reason": body.get("reason") or ""})

    def route(verb: str) -> None:
        @app.post(f"/v1/{verb}")
        async def post(request: Request) -> Response:
            return await change(request, verb, {**dict(request.query_params), **await _body(request)})

    for verb in VERBS:
        route(verb)


def _add_errors(app: FastAPI) -> None:
    """Every error has the envelope."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return _error(error.message, error.status, code=error.code, param=error.param, hint=error.hint, operation=getattr(error, "operation", None))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        hint = "GET /v1/status, or llmctl --help" if error.status_code == 404 else ""
        return _error(str(error.detail), error.status_code, code=code, hint=hint, headers=dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _error("internal error; the log has more", 500, code="internal_error")


def refuse_browsers(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """A request that a web page made is refused before anything looks at it."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name.lower().startswith(_BROWSER_HEADERS) for name, _ in scope["headers"]):
            await _error("requests from web pages are refused", 403, code="forbidden")(scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


async def _while_connected(request: Request, work: asyncio.Task[Any]) -> None:
    """Until `work` is done or its caller has hung up."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise RequestError(f"the body is longer than {MAX_BODY} bytes", code="request_too_large")
    if not data.strip():
        return {}
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return body


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name}: not a string", param=name)
    return value


def _json(value: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code, headers=headers, media_type="application/json")


def _error(
    message: str,
    status_code: int,
    *,
    code: str | None = None,
    param: str | None = None,
    hint: str = "",
    operation: Operation | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body: dict[str, Any] = envelope(message, status_code, code=code, param=param)
    body["error"] |= {"hint": hint or None, "operation_id": operation.id if operation else None}
    if operation is not None:
        body["operation"] = msgspec.to_builtins(operation)
    return _json(body, status_code, headers)
