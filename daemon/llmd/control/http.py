"""Pieces of the admin plane's HTTP: bodies in, JSON and the error envelope out, browsers kept off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmd.control.operation import Operation
from llmd.errors import RequestError, envelope

#: Bytes of the longest request body.
MAX_BODY = 2**20

#: Headers that only a browser sends. A web page must not reach this plane.
_BROWSER_HEADERS = (b"origin", b"referer", b"sec-fetch-")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Request], Awaitable[Response]]


def get(path: str, handler: Handler) -> Route:
    """A route that takes GET alone: starlette would add HEAD."""
    route = Route(path, handler, methods=["GET"])
    route.methods = {"GET"}
    return route


def post(path: str, handler: Handler) -> Route:
    """A route that takes POST."""
    return Route(path, handler, methods=["POST"])


def add_errors(app: Starlette) -> None:
    """Every error has the envelope."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        operation, holder = getattr(error, "operation", None), getattr(error, "holder", None)
        return error_response(error.message, error.status, code=error.code, param=error.param, hint=error.hint, operation=operation, holder=holder)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        hint = "GET /v1/status, or llmctl --help" if error.status_code == 404 else ""
        return error_response(str(error.detail), error.status_code, code=code, hint=hint, headers=dict(error.headers or {}))

    async def broken(request: Request, error: Exception) -> Response:
        return error_response("internal error; the log has more", 500, code="internal_error")

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, broken)


def refuse_browsers(app: App) -> App:
    """A request that a web page made is refused before anything looks at it."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name.lower().startswith(_BROWSER_HEADERS) for name, _ in scope["headers"]):
            await error_response("requests from web pages are refused", 403, code="forbidden")(scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


async def while_connected(request: Request, work: asyncio.Future[Any]) -> None:
    """Until `work` is done or its caller has hung up."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that came, {} for nothing. Raises RequestError."""
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


def text(value: Any, name: str) -> str:
    """`value` if it is a string. Raises RequestError."""
    if not isinstance(value, str):
        raise RequestError(f"{name}: not a string", param=name)
    return value


def flag(value: Any, name: str) -> bool:
    """True or false, from JSON or a query string. Raises RequestError."""
    if isinstance(value, bool):
        return value
    if value in ("true", "1", "false", "0"):
        return value in ("true", "1")
    raise RequestError(f"{name}: neither true nor false", param=name)


def whole(value: str, name: str, most: int) -> int:
    """A whole number from 0 to `most`. Raises RequestError."""
    if not value.isdecimal() or len(value) > 18 or int(value) > most:
        raise RequestError(f"{name}: not a whole number from 0 to {most}", param=name)
    return int(value)


def json_response(value: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON of whatever msgspec can write."""
    return Response(msgspec.json.encode(value), status_code, headers=headers, media_type="application/json")


def error_response(
    message: str,
    status_code: int,
    *,
    code: str | None = None,
    param: str | None = None,
    hint: str = "",
    operation: Operation | None = None,
    holder: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The envelope. `operation_id` is the one that failed, or the one that is in the way."""
    body: dict[str, Any] = envelope(message, status_code, code=code, param=param)
    body["error"] |= {"hint": hint or None, "operation_id": operation.id if operation else holder}
    if operation is not None:
        body["operation"] = msgspec.to_builtins(operation)
    return json_response(body, status_code, headers)
