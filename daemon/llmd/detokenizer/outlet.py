"""`Outlet`: the way to one frontend. Never blocks; keeps a bounded backlog while the frontend is away or slow, then drops it."""

from __future__ import annotations

from collections import deque

import zmq

from llmd.wire import sockets

#: Bytes kept for one frontend beyond what its socket holds.
MAX_BACKLOG = 8 * 1024 * 1024

#: Messages that the socket holds.
HIGH_WATER = 1000


class Outlet:
    """Wraps the PUSH socket of one frontend. While `backlog` is true its owner polls `socket` for POLLOUT and calls `flush`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = sockets.push(context, endpoint, high_water=HIGH_WATER)
        self._frames: deque[bytes] = deque()
        self._size = 0

    @property
    def backlog(self) -> bool:
        return bool(self._frames)

    def send(self, frame: bytes) -> bool:
        """Send or keep a frame; False: too much was kept, and all of it and this frame are dropped."""
        if not self._frames and self._send(frame):
            return True
        self._frames.append(frame)
        self._size += len(frame)
        if self._size <= MAX_BACKLOG:
            return True
        self._frames.clear()
        self._size = 0
        return False

    def flush(self) -> None:
        """Send what was kept, as far as the socket takes it."""
        while self._frames and self._send(self._frames[0]):
            self._size -= len(self._frames.popleft())

    def close(self) -> None:
        self.socket.close()

    def _send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
