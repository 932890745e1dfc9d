"""The listening socket of the data plane: bound before anything slow, or taken over from systemd."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import MutableMapping

from msgspec import Struct

from llmd.config.listen import bare_host
from llmd.errors import ResourceError

log = logging.getLogger(__name__)

#: First descriptor of the socket activation protocol (man 3 sd_listen_fds).
LISTEN_FDS_START = 3


class Listener(Struct):
    """An open, listening TCP socket."""

    socket: socket.socket
    activated: bool
    """systemd holds it too: while llmd is away, connections wait in its backlog."""

    @property
    def host(self) -> str:
        return str(self.socket.getsockname()[0])

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        return url_of(self.host, self.port)


def url_of(host: str, port: int) -> str:
    """http URL of an address; one that means every address becomes this machine's own."""
    host = bare_host(host)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int, backlog: int, environ: MutableMapping[str, str]) -> Listener:
    """The socket that systemd passed, else a new one on host:port. LISTEN_* is taken out of `environ`. Raises ResourceError."""
    passed = _activated(environ)
    return passed if passed is not None else Listener(bind(host, port, backlog), activated=False)


def bind(host: str, port: int, backlog: int) -> socket.socket:
    """Bind and listen on host:port (IPv4, IPv6, or a name; port 0 takes a free one). Raises ResourceError naming host:port."""
    return _bound(host, port, backlog)


def judge(host: str, port: int) -> None:
    """Whether `bind` could have host:port now. Listens nowhere. Raises what `bind` would raise; `__cause__` is the system's own error."""
    _bound(host, port, None).close()


def _bound(host: str, port: int, backlog: int | None) -> socket.socket:
    host = bare_host(host)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ResourceError(f"cannot listen on {where}: {error.strerror or error}", hint="check http.host") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        if backlog is not None:
            made.listen(backlog)
    except OSError as error:
        made.close()
        hint = {
            errno.EADDRINUSE: f"another program has it: see `ss -ltnp 'sport = :{port}'`, or set http.port",
            errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE",
            errno.EADDRNOTAVAIL: "this machine has no such address: check http.host",
        }.get(error.errno or 0, "")
        raise ResourceError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}", hint=hint) from error
    return made


def _activated(environ: MutableMapping[str, str]) -> Listener | None:
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) < 1:
        return None
    for extra in range(LISTEN_FDS_START + 1, LISTEN_FDS_START + int(count)):
        log.warning("socket activation passed more than one socket; descriptor %d is not used", extra)
        os.close(extra)
    try:
        passed = socket.socket(fileno=LISTEN_FDS_START)
        usable = passed.family in (socket.AF_INET, socket.AF_INET6) and bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise ResourceError(f"LISTEN_FDS={count}, but descriptor {LISTEN_FDS_START} is no socket: {error.strerror}") from None
    if not usable:
        raise ResourceError("the socket passed by systemd is not a listening TCP socket", hint="use ListenStream=HOST:PORT with Accept=no")
    passed.set_inheritable(False)
    return Listener(passed, activated=True)
