"""Whole (not streamed) answers, and the error envelope in both of its forms."""

from __future__ import annotations

from typing import Any

import msgspec

from llmd.errors import RequestError, envelope
from llmd.frontend.exchange import Send

dumps = msgspec.json.Encoder().encode

JSON = (b"content-type", b"application/json")


async def reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send one whole answer; JSON unless `headers` say another content type."""
    base = list(headers or ())
    if not any(name == b"content-type" for name, _ in base):
        base.append(JSON)
    base.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": base})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def reply_json(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send one JSON answer."""
    await reply(send, status, dumps(body), headers)


def internal_error() -> RequestError:
    """The generic text of an error of our own; the log has the rest under the request's id."""
    return RequestError("the server made an error; its log has the details", code="internal_error")


def error_body(error: RequestError) -> bytes:
    """`{"error": {...}}`."""
    return dumps(envelope(error.message, error.status, code=error.code, param=error.param))


def error_headers(error: RequestError) -> dict[str, str]:
    """Retry-After where trying again helps; WWW-Authenticate where a key does; `Connection: close` where a body is left unread."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return {**headers, "connection": "close"} if error.status in (408, 413, 505) else headers


async def reply_error(send: Send, error: RequestError) -> None:
    """Send an error's envelope with its status."""
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await reply(send, error.status, error_body(error), headers)
