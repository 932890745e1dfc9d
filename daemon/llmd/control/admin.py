"""The admin plane's servers, in control's own loop. What they serve is in llmd.control.routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from llmd.control import admin_socket, admin_tcp, peer
from llmd.control.core import Core
from llmd.control.history import History
from llmd.control.http import App, refuse_browsers
from llmd.control.operations import Operations
from llmd.control.routes import build

log = logging.getLogger("llmd.control")


class AdminServer:
    """The sockets and the servers on them: the unix socket, and TCP where `admin.listen` says so."""

    def __init__(self, core: Core, operations: Operations, history: History) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._core = core
        self._app = build(core, operations, history)
        self._sockets: list[socket.socket] = []
        self._servers: list[_Server] = []

    def bind(self) -> None:
        """Take the sockets. Raises ResourceError."""
        args = self._core.boot.args.admin
        path = Path(args.socket) if args.socket else self._core.boot.ports.admin_socket
        self._add(admin_socket.bind(path, args.group, missed=self._level_of_a_missing_group()), self._app, http=peer.PeerProtocol)
        if args.listen is not None:
            guarded = admin_tcp.behind_key(self._app, lambda: self._core.boot.args.http.admin_key_file)
            self._add(admin_tcp.bind(args.listen), guarded, http=H11Protocol, ssl_certfile=args.tls_cert, ssl_keyfile=args.tls_key)
            log.info("admin plane on %s%s too", "https://" if args.tls_cert else "http://", args.listen)

    def _level_of_a_missing_group(self) -> int:
        """A WARNING for a service, and where somebody has named the group; whoever tries llmd out as himself misses nothing. Told once, not by each control."""
        if self._core.resumed:
            return logging.DEBUG
        boot = self._core.boot
        named = boot.source is not None and boot.source.origins.get("admin.group", "default") != "default"
        return logging.WARNING if named or boot.ports.run_dir.startswith("/run/") else logging.DEBUG

    def _add(self, listener: socket.socket, app: App, **options: Any) -> None:
        config = uvicorn.Config(
            refuse_browsers(app), ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=30, proxy_headers=False, **options
        )
        self._sockets.append(listener)
        self._servers.append(_Server(config))

    async def run(self) -> None:
        """Serve, for ever."""
        assert self._sockets, "bind comes first"
        await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in zip(self._servers, self._sockets, strict=True)))

    async def answered(self, within: float) -> None:
        """Return when all requests have been answered, or after so many seconds."""
        running = [task for server in self._servers for task in server.server_state.tasks]
        if running:
            await asyncio.wait(running, timeout=within)

    def close(self) -> None:
        """Stop listening. The socket file stays, so that a caller is refused rather than told that nothing is there."""
        for running in self._servers:
            for server in getattr(running, "servers", []):
                server.close()
        for listener in self._sockets:
            listener.close()


class _State(ServerState):
    """Makes the Date header for each response: uvicorn would do it each second, though nobody asks."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__()
        self._config = config

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode()), *self._config.encoded_headers]

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """What uvicorn sets is not needed."""


class _Server(uvicorn.Server):
    """Signals are control's own, and so is its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = _State(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """uvicorn would look ten times a second whether it shall exit; nobody asks that of this one."""
        await asyncio.get_running_loop().create_future()
