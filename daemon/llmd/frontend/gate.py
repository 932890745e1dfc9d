"""`Gate`: the outermost ASGI layer. Every HTTP request passes it once: keys and ids checked, ids echoed, headers added, errors of
our own logged under the request's id, the outcome counted, the access log written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from llmd.config.server_args import ServerArgs
from llmd.errors import RequestError
from llmd.frontend.access import Guard, KeyRing
from llmd.frontend.engine_view import shutting_down
from llmd.frontend.exchange import FAULT, KEY, TRANSPORT, Exchange, Receive, Scope, Send, outcome_of
from llmd.frontend.limits import MAX_REQUEST_ID
from llmd.frontend.replies import reply_error
from llmd.frontend.runtime import Runtime
from llmd.frontend.server import frame_by_close

log = logging.getLogger(__name__)

App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Versions of HTTP that are spoken here.
_VERSIONS: Final = ("0.9", "1.0", "1.1")


class Gate:
    """Wraps the application. `guard` sees every request before anything else looks at it. `paths`: those of the routes, for the metrics' labels."""

    def __init__(self, app: App, runtime: Runtime, guard: Guard, paths: Iterable[str] = ()) -> None:
        self._app = app
        self._runtime = runtime
        self._guard = guard
        self._paths = frozenset(paths)
        self._prefixes = tuple(path.partition("{")[0] for path in self._paths if "{" in path)

    def configure(self, args: ServerArgs) -> None:
        """Go by other values from the next request on; files of keys are read anew."""
        self._guard.configure(args, KeyRing(args.http.api_keys_file, args.http.admin_key_file))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope[KEY] = Exchange()
        exchange.endpoint = self._label(scope["path"])
        complete, key = False, None

        async def passing(message: MutableMapping[str, Any]) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if scope["method"] != "HEAD":  # which brings no body for the head to go with
                    scope[TRANSPORT].transport.hold()
                message["headers"] = [*message.get("headers", ()), *self._headers(exchange)]
            elif not message.get("more_body"):
                complete = True
            frame_by_close(scope, message)
            await send(message)

        try:
            exchange.request_id = _request_id(scope)
            _check_protocol(scope)
            key = self._guard.admit(scope)
            exchange.key = key.name if key is not None else ""
            await self._app(scope, receive, passing)
        except RequestError as error:
            exchange.settle(outcome_of(error))
            await reply_error(passing, error)
        except asyncio.CancelledError:
            # The server ends and waits no longer. Whoever has got no answer yet gets one; a begun answer is cut, not completed.
            exchange.settle(outcome_of(shutting_down()))
            if exchange.status == 0:
                await reply_error(passing, shutting_down())
            elif not complete:
                scope[TRANSPORT].transport.abort()
                await asyncio.sleep(0)
        except Exception:
            log.exception("a request failed", extra={"request_id": exchange.request_id, "rid": exchange.rid})
            exchange.settle("error")
            if not complete:
                raise
        finally:
            if isinstance(fault := scope.get(FAULT), RequestError):
                exchange.settle(outcome_of(fault))
            self._guard.charge(key, (exchange.prompt_tokens or 0) + (exchange.completion_tokens or 0))
            self._count(scope, exchange)
            self._runtime.access_log.write(scope, exchange)

    def refused(self, scope: Scope, error: RequestError) -> list[tuple[bytes, bytes]]:
        """The server has refused bytes that never became a request of the application: count it, log it. Returns the headers for its answer."""
        exchange = Exchange()
        exchange.endpoint, exchange.status = self._label(scope["path"]), error.status
        exchange.settle(outcome_of(error))
        self._count(scope, exchange)
        self._runtime.access_log.write(scope, exchange)
        return self._headers(exchange)

    def _label(self, path: str) -> str | None:
        """The metrics' name of the route for a path, whatever its method; None for a path that nobody serves."""
        if path in self._paths:
            return path
        return next((f"{prefix}ID" for prefix in self._prefixes if path.startswith(prefix) and path != prefix), None)

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        view = self._runtime.view
        headers = [(b"x-llmd-weights", view.weights_version.encode("ascii", "replace"))]
        if exchange.request_id:
            headers.append((b"x-request-id", exchange.request_id.encode()))
        if exchange.rid:
            headers.append((b"x-llmd-rid", exchange.rid.encode()))
        if view.draining:
            headers.append((b"connection", b"close"))
        return headers

    def _count(self, scope: Scope, exchange: Exchange) -> None:
        path = scope["path"]
        if path.startswith("/v1/") or path == "/generate":
            outcome = exchange.outcome or ("ok" if exchange.status < 400 else outcome_of(RequestError("", status=exchange.status)))
            self._runtime.meter.inc("llmd_requests_total", endpoint=exchange.endpoint or "unknown", outcome=outcome)
            if scope["method"] == "POST" and exchange.endpoint is not None:
                self._runtime.meter.observe("llmd_request_duration_seconds", time.monotonic() - exchange.started)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            if not 0 < len(value) <= MAX_REQUEST_ID or not all(32 <= byte < 127 for byte in value):
                raise RequestError(f"X-Request-Id: must be 1 to {MAX_REQUEST_ID} printable ASCII characters", param="X-Request-Id")
            return str(value, "ascii")
    return ""


def _check_protocol(scope: Scope) -> None:
    """Raises RequestError for what a client asks of the connection and does not get."""
    if scope["http_version"] not in _VERSIONS:
        raise RequestError(f"HTTP/{scope['http_version']} is not spoken here, HTTP/1.1 is", status=505)
    for name, value in scope["headers"]:
        if name == b"expect" and value.lower() != b"100-continue":
            raise RequestError("Expect: only 100-continue is known here", param="Expect", status=417)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError("Content-Encoding: bodies are taken as they are only, not compressed", param="Content-Encoding", status=415)
