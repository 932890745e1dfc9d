"""Taking connections where several frontends wait at one queue: one at a time, and who has more than the others lets them go first.

One queue and not one a frontend (SO_REUSEPORT): of a frontend that is dead or hangs nobody's connection waits, the others take them all.
The kernel wakes every frontend, whoever is fastest gets it; left at that, one that takes all there is gets most of a burst.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

#: Seconds that a frontend with more connections than another one leaves the queue to it. It takes what is still there then.
STEP_BACK_S: Final = 0.002
#: Seconds without a try after the system has refused a connection (it is out of descriptors, mostly).
REFUSED_S: Final = 0.1


class Board:
    """How many connections each frontend has: 8 bytes for each, in a file that all of them map. The last word of a dead one stays there."""

    def __init__(self, path: Path, frontends: int, mine: int) -> None:
        size = 8 * frontends
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._counts = memoryview(self._map).cast("q")
        self._others = [n for n in range(frontends) if n != mine]
        self._mine = mine
        self.add(-self._counts[mine])

    def add(self, count: int) -> None:
        """So many more; nobody else writes there."""
        self._counts[self._mine] += count

    @property
    def ahead(self) -> bool:
        """Whether this frontend has clearly more than another one."""
        least = min((self._counts[n] for n in self._others), default=self._counts[self._mine])
        return self._counts[self._mine] > least + 1 + least // 8

    def close(self) -> None:
        self._counts.release()
        self._map.close()


class Acceptor:
    """Takes connections from `listener` in the running event loop, from now until `close`.

    `protocol(lost)` makes a connection's protocol, which calls `lost` once when it has ended."""

    def __init__(self, listener: socket.socket, board: Board, protocol: Callable[[Callable[[], None]], asyncio.Protocol]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._board = board
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listen()

    def close(self) -> None:
        """Take none from now on."""
        self._closed = True
        self._wait(None)

    async def wait_closed(self) -> None:
        """Until the connections that were taken last have been handed over; uvicorn waits for their end itself."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._readable)

    def _wait(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._pause is None:
            self._loop.remove_reader(self._listener.fileno())
        else:
            self._pause.cancel()
        self._pause = None if seconds is None or then is None else self._loop.call_later(seconds, then)

    def _readable(self) -> None:
        if self._board.ahead:
            self._wait(STEP_BACK_S, self._insist)
        else:
            self._accept()

    def _insist(self) -> None:
        self._listen()
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another frontend was faster, or the client has gone
        except OSError:
            self._wait(REFUSED_S, self._listen)
            return
        self._board.add(1)
        self._spawn(self._begin(connection))

    async def _begin(self, connection: socket.socket) -> None:
        lost = _Once(lambda: self._board.add(-1))
        try:
            await self._loop.connect_accepted_socket(lambda: self._protocol(lost), connection)
        except BaseException:
            lost()
            with contextlib.suppress(OSError):
                connection.close()
            raise

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Once:
    """Calls what it has at its first call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
