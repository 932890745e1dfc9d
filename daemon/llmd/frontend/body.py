"""Reading and parsing a request's body: bounded in bytes and in depth, big ones parsed off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import MutableMapping
from concurrent.futures import Executor
from typing import Any, Final

from llmd.errors import RequestError
from llmd.frontend.exchange import Receive, Scope
from llmd.frontend.limits import INLINE_BODY, MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_NAMES

#: Seconds and bytes beyond the limit for which a body that is too large is still read, so that the client gets the answer instead of a reset.
SWALLOW_S: Final = 2.0
SWALLOW_BYTES: Final = 64 * 2**20
#: Seconds in which some byte of a body has to come.
BODY_IDLE_S: Final = 60.0

#: A string that never ends is taken to the end, so that no byte is looked at twice: nothing in it may be tried again as the start of another.
_MARKS: Final = re.compile(rb'[\[{\]}:]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class ClientGone(Exception):
    """The client hung up; nobody is there to answer."""


async def read_json(scope: Scope, receive: Receive, *, limit: int, executor: Executor) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError 400 `invalid_json`, 413; ClientGone."""
    body = await _read(scope, receive, limit)
    if len(body) <= INLINE_BODY:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(executor, parse, body)


async def read_optional_json(scope: Scope, receive: Receive, *, limit: int, executor: Executor) -> dict[str, Any]:
    """The same, where no body at all means an empty object."""
    body = await _read(scope, receive, limit)
    if not body.strip():
        return {}
    return parse(body) if len(body) <= INLINE_BODY else await asyncio.get_running_loop().run_in_executor(executor, parse, body)


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        if b"expect" not in headers and int(declared) <= limit + SWALLOW_BYTES:
            await _swallow(receive)
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await _next(receive)
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            if message.get("more_body"):
                await _swallow(receive)
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _next(receive: Receive) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout(BODY_IDLE_S):
            return await receive()
    except TimeoutError:
        raise RequestError(f"no byte of the request body came for {BODY_IDLE_S:g} s", status=408) from None


async def _swallow(receive: Receive) -> None:
    """Read on for a moment, so that the client has sent all it wants to send when the answer comes."""
    size = 0
    try:
        async with asyncio.timeout(SWALLOW_S):
            while size <= SWALLOW_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the request body is larger than the limit of {limit} bytes", code="request_too_large")


def parse(body: bytes) -> dict[str, Any]:
    """Bytes -> object. NaN, Infinity and 1e999 pass here as floats, so that the field they stand in can be named."""
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH or body.count(b":") > MAX_JSON_NAMES:
        _check_shape(body)
    try:
        # Bytes would be taken for UTF-16 or UTF-32 where they look like it, whose marks the bounds above cannot see.
        data = json.loads(body.decode("utf-8-sig"))
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        where = f" at line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise RequestError(f"the request body is not valid JSON{where}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    return data


def _check_shape(body: bytes) -> None:
    """Before it is parsed: millions of small objects take seconds to make, and to forget again."""
    depth = containers = names = 0
    for match in _MARKS.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            containers += 1
            if depth > MAX_JSON_DEPTH:
                raise _too_deep()
            if containers > MAX_JSON_CONTAINERS:
                raise _too_many("lists and objects", MAX_JSON_CONTAINERS)
        elif first in b"]}":
            depth -= 1
        elif first in b":":
            names += 1
            if names > MAX_JSON_NAMES:
                raise _too_many("named values", MAX_JSON_NAMES)


def _too_many(what: str, limit: int) -> RequestError:
    return RequestError(f"the request body holds more than the limit of {limit} {what}", code="invalid_json")


def _too_deep() -> RequestError:
    return RequestError(f"the request body nests deeper than the limit of {MAX_JSON_DEPTH} levels", code="invalid_json")
