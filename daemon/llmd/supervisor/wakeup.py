"""What ends supervisord's poll in time: a socketpair that signals write to, and deadlines.

supervisord polls for up to a second (here a little longer), and since PEP 475 a signal does not end a poll.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

from supervisor.medusa import asyncore_25 as asyncore
from supervisor.poller import PollPoller


class Wakeup:
    """An entry of supervisord's socket map whose reading end becomes ready on each signal and each `kick`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._fd = self._reader.fileno()

    def install(self) -> None:
        """Take part in the loop. Signals must have handlers to be seen."""
        asyncore.socket_map[self._fd] = self
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Leave the loop."""
        signal.set_wakeup_fd(-1)
        asyncore.socket_map.pop(self._fd, None)
        self._reader.close()
        self._writer.close()

    def kick(self) -> None:
        """Make the next poll return at once."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def handle_error(self) -> None:
        """Nothing of it can fail."""


#: Seconds that supervisord polls for at most; for its own one it would wake just before each of control's reports, for nothing.
POLL_S = 1.25


class DeadlinePoller(PollPoller):  # type: ignore[misc]
    """Polls no longer than until the next thing to do."""

    def __init__(self, options: Any, seconds_left: Callable[[], float]) -> None:
        super().__init__(options)
        self._seconds_left = seconds_left

    def poll(self, timeout: float) -> Any:
        return super().poll(max(0.0, min(POLL_S, self._seconds_left())))
