"""The admin plane's server: a unix socket, in control's own loop. What it serves is in llmd.control.routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from llmd.control import admin_socket, peer
from llmd.control.core import Core
from llmd.control.http import refuse_browsers
from llmd.control.operations import Operations
from llmd.control.routes import build
from llmd.control.status import Rates

log = logging.getLogger("llmd.control")


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
