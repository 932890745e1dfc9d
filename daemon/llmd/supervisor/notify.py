"""sd_notify, by the supervisor alone: READY once, STATUS on change, RELOADING around a reload, STOPPING, WATCHDOG while control says all is
well, EXTEND_TIMEOUT_USEC while a start makes progress.

An absent, odd or dead socket is harmless: one WARNING, and llmd goes on. What a full one does not take is kept, the newest word of each kind, and
sent again: systemd waits for READY=1, and would end a start that is over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

#: sockaddr_un.sun_path.
_PATH_LIMIT = 107
#: Seconds between two extensions at least.
EXTEND_EVERY = 1.0
#: Seconds until what was not taken is sent again.
AGAIN_S = 0.1
#: What passes: the socket is full, or we are out of memory or descriptors.
_PASSING = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class Notifier:
    """One notify socket. Takes its variables out of `environ`, so no child can speak in llmd's name."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        self.managed = bool(self._address)
        """Whether systemd runs this llmd."""
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._warned = False
        self._ready = False
        self._stopping = False
        self._status = ""
        mine = pid in ("", str(os.getpid()))
        #: Seconds between pings, half of what systemd allows; None: no watchdog.
        self.watchdog_period: float | None = int(usec) / 2e6 if mine and usec.isdecimal() and int(usec) > 0 else None
        self._next_ping = 0.0
        self._extended_at = -EXTEND_EVERY
        self._reloading = False
        #: Kind of word -> the newest one, in the order of their sending.
        self._pending: dict[str, str] = {}
        self._again_at = 0.0

    def ready(self) -> None:
        """READY=1, once in a life."""
        if not self._ready:
            self._ready = True
            self._pending.pop("extend", None)
            self._send("ready", "READY=1")

    def extend(self, seconds: float) -> None:
        """A start that has just made progress may take `seconds` more: systemd's own limit counts from now."""
        now = time.monotonic()
        if not self._ready and not self._stopping and now - self._extended_at >= EXTEND_EVERY:
            self._extended_at = now
            self._send("extend", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def reloading(self, on: bool) -> None:
        """RELOADING=1 when a reload begins, READY=1 when it is over, however it went."""
        if on == self._reloading or not self._ready or self._stopping:
            return
        self._reloading = on
        if on:
            self._pending.pop("reloaded", None)  # of an earlier reload that systemd has not heard of; this one's will do
            self._send("reloading", f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        else:
            self._send("reloaded", "READY=1")

    def status(self, text: str) -> None:
        """STATUS=, when it has changed."""
        line = " ".join(text.split())
        if line != self._status:
            self._status = line
            self._send("status", f"STATUS={line}")

    def stopping(self) -> None:
        """STOPPING=1, once."""
        if not self._stopping:
            self._stopping = True
            self._send("stopping", "STOPPING=1")

    def tick(self, now: float, healthy: bool) -> None:
        """Ping the watchdog if it is time to and all is well; send again what has not been taken."""
        if self.watchdog_period is not None and healthy and now >= self._next_ping:
            self._next_ping = now + self.watchdog_period
            self._send("watchdog", "WATCHDOG=1")
        elif self._pending:
            self._flush()

    def next_wake(self, healthy: bool) -> float | None:
        """When `tick` has something to do."""
        ping = self._next_ping if self.watchdog_period is not None and healthy else None
        if not self._pending:
            return ping
        return self._again_at if ping is None else min(ping, self._again_at)

    def _send(self, kind: str, text: str) -> None:
        if self._address:
            self._pending.pop(kind, None)
            self._pending[kind] = text
            self._flush()

    def _flush(self) -> None:
        """Send what is pending, in its order, up to the first word that is not taken now."""
        while self._pending:
            kind = next(iter(self._pending))
            if not self._deliver(self._pending[kind]):
                self._again_at = time.monotonic() + AGAIN_S
                return
            del self._pending[kind]

    def _deliver(self, text: str) -> bool:
        """Whether it is done with: sent, or not to be sent at all."""
        try:
            target = self._target()
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), target)
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                log.warning("systemd cannot be notified: NOTIFY_SOCKET %r: %s", self._address[:200], error)
            return not (isinstance(error, OSError) and error.errno in _PASSING)
        return True

    def _target(self) -> str:
        if not self._address.startswith(("/", "@")):
            raise ValueError("neither a path nor an abstract address")
        if len(self._address.encode()) > _PATH_LIMIT:
            raise ValueError(f"longer than {_PATH_LIMIT} bytes")
        return "\0" + self._address[1:] if self._address.startswith("@") else self._address
