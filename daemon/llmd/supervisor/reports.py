"""RUN/private/reports.sock: control's reports, a line of JSON each; the answer is a line with the snapshot of all processes.

Beside XML-RPC because a report comes each second, for as long as llmd lives: HTTP and XML would take most of what an idle supervisor costs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from supervisor.medusa import asyncore_25 as asyncore

log = logging.getLogger(__name__)

#: Bytes that are read at once, and of a line at most; a report has some hundred.
_READ, _MOST = 2**16, 2**20
#: Seconds between two words about what is wrong with reports.
WARN_EVERY = 60.0


class Burst:
    """Of things that may come in bursts, one in WARN_EVERY is told, with the number of those before it that were not."""

    def __init__(self) -> None:
        self._told_at = -WARN_EVERY
        self._kept = 0

    def due(self, now: float) -> int | None:
        """One has come at `now` (monotonic). None: keep quiet; else how many were kept quiet about since the last that was told."""
        if now - self._told_at < WARN_EVERY:
            self._kept += 1
            return None
        kept, self._kept, self._told_at = self._kept, 0, now
        return kept


class _Entry:
    """What supervisord's loop asks of an entry of its socket map."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._fd = sock.fileno()
        sock.setblocking(False)
        asyncore.socket_map[self._fd] = self

    def close(self) -> None:
        """Leave the loop. Once more does nothing: the descriptor may be another's by then."""
        if asyncore.socket_map.get(self._fd) is self:
            del asyncore.socket_map[self._fd]
        self._socket.close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_error(self) -> None:
        """The loop has caught an exception of ours."""
        log.exception("a connection for reports has failed")
        self.close()


class ReportSocket(_Entry):
    """Takes connections. `answer`: one report -> its answer, neither with its line's end."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        self._path = path
        self._answer = answer
        self._lines: list[_Line] = []
        super().__init__(_listener(path))
        self._inode = path.lstat().st_ino

    def restore(self) -> None:
        """Be at the path again if somebody has removed the socket or put something in its place: a new control finds us nowhere else. Connections stay."""
        try:
            if self._is_there():
                return
            self._path.unlink(missing_ok=True)
            listener = _listener(self._path)
            self._inode = self._path.lstat().st_ino
        except OSError as error:
            log.error("%s is no longer the socket for control's reports, and cannot become it again: %s", self._path, error)
            return
        log.warning("the socket for control's reports was gone from %s, and is there again", self._path)
        super().close()
        super().__init__(listener)

    def _is_there(self) -> bool:
        try:
            return self._path.lstat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        for line in self._lines:
            line.close()
        super().close()

    def handle_read_event(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was is gone; or we are out of descriptors, and it waits
            self._lines = [line for line in self._lines if line.open]
            self._lines.append(_Line(self._socket.accept()[0], self._answer))


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class _Line(_Entry):
    """One connection."""

    def __init__(self, sock: socket.socket, answer: Callable[[bytes], bytes]) -> None:
        super().__init__(sock)
        self._answer = answer
        self._in = self._out = b""
        self.open = True

    def close(self) -> None:
        self.open = False
        super().close()

    def readable(self) -> bool:
        return not self._out  # who does not read its answers is not heard

    def writable(self) -> bool:
        return bool(self._out)

    def handle_read_event(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._in += data
        if not data or len(self._in) > _MOST:
            self.close()
            return
        self._serve()

    def handle_write_event(self) -> None:
        if not self.open:
            return  # closed in the same round of the loop
        self._send()
        self._serve()

    def _send(self) -> None:
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _serve(self) -> None:
        """Answer line by line, each when the answer before it is out."""
        while self.open and not self._out and b"\n" in self._in:
            report, _, self._in = self._in.partition(b"\n")
            self._out = self._answer(report) + b"\n"
            self._send()
