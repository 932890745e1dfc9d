"""The admin plane over TCP (`admin.listen`), for those who are not on this machine: the same application behind the admin key, with TLS if configured.

The key's file is read for each request, so that a new key counts at once. A wrong one is answered late, and looks like any other wrong one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Callable

from llmd.config.keys import digest_of, read_admin_key
from llmd.config.listen import host_and_port
from llmd.control.http import App, Receive, Scope, Send, error_response
from llmd.control.peer import KEY
from llmd.errors import ConfigError, ResourceError

log = logging.getLogger("llmd.control")

#: Seconds until a wrong key is answered.
LATE = 0.5
#: Seconds between two warnings about callers without the key.
TELL_EVERY = 60.0
BACKLOG = 128


def bind(listen: str) -> socket.socket:
    """A listening TCP socket at `host:port`. Raises ResourceError."""
    host, port = host_and_port(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise ResourceError(f"admin.listen: {listen}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceError(f"admin.listen: cannot listen on {listen}: {error.strerror}", hint="is another process there already?") from None
    listener.setblocking(False)
    return listener


def behind_key(app: App, key_file: Callable[[], str | None]) -> App:
    """`app` for whoever presents the admin key: Authorization: Bearer KEY."""
    told = _Refusals()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if not _knows(scope, key_file()):
            told(scope)
            await asyncio.sleep(LATE)
            refused = error_response("give the admin key: Authorization: Bearer KEY", 401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await refused(scope, receive, send)
            return
        scope[KEY] = "admin"
        await app(scope, receive, send)

    return guarded


class _Refusals:
    """One WARNING a minute about callers without the key, and how many there were."""

    def __init__(self) -> None:
        self._count = 0
        self._told_at = float("-inf")

    def __call__(self, scope: Scope) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY:
            client = scope.get("client")
            log.warning("admin plane over TCP: %d refused for want of the admin key, the last from %s", self._count, client[0] if client else "somewhere")
            self._told_at, self._count = now, 0


def _knows(scope: Scope, key_file: str | None) -> bool:
    """Compares digests, in constant time; a file that cannot be read lets nobody in."""
    presented = next((bytes(value) for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = presented.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip() or key_file is None:
        return False
    try:
        return hmac.compare_digest(digest_of(key.strip()), read_admin_key(key_file))
    except ConfigError as error:
        log.error("the admin key cannot be read, so nobody gets in over TCP: %s", "; ".join(error.faults))
        return False
