"""Who is at the other end of the admin socket: uid, gid and pid from the kernel, not from the client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Container
from pathlib import Path
from typing import Any

from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

#: struct ucred: pid, uid, gid (man 7 unix, SO_PEERCRED).
_UCRED = struct.Struct("3i")

#: What /proc shows for a process outside any login.
_NO_LOGIN = 2**32 - 1


#: Where the scope of a request over TCP says whose key came with it.
KEY = "llmd.key"

#: Headers in which a frontend that passes a call on says whose key it came with, and from where.
PASSED_KEY, PASSED_ADDRESS = b"x-llmd-passed-key", b"x-llmd-passed-address"


class Peer(Struct, frozen=True):
    """The caller: a process of this machine, or who has the key of the name `key` and came over TCP from `address`. All None: a signal, or nobody knows."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    loginuid: int | None = None
    key: str | None = None
    address: str | None = None


class PeerProtocol(H11Protocol):
    """HTTP whose `scope["client"]` is ("uid:gid:pid", 0): a unix socket has no address to put there."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            self.client = (f"{uid}:{gid}:{pid}", 0)


def of(scope: Any) -> Peer:
    """The peer of a request's scope."""
    if KEY in scope:
        return Peer(key=scope[KEY], address=scope["client"][0] if scope.get("client") else None)
    try:
        uid, gid, pid = (int(part) for part in scope["client"][0].split(":"))
    except (KeyError, TypeError, ValueError, IndexError):
        return Peer()
    return Peer(uid, gid, pid, _loginuid(pid))


def passed_on(scope: Any, frontends: Container[int]) -> Peer:
    """The peer of a request's scope; where that is one of our `frontends` (pids), for whom it speaks. Nobody else is believed that."""
    caller = of(scope)
    headers = dict(scope["headers"])
    if caller.pid not in frontends or PASSED_KEY not in headers:
        return caller
    return Peer(key=_text(headers[PASSED_KEY]), address=_text(headers.get(PASSED_ADDRESS, b"")) or None)


def _text(header: bytes) -> str:
    return header.decode("latin-1")[:128]


def _loginuid(pid: int) -> int | None:
    try:
        value = int(Path(f"/proc/{pid}/loginuid").read_text())
    except (OSError, ValueError):
        return None
    return None if value == _NO_LOGIN else value
