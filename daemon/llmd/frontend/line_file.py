"""`LineFile`: a file that lines are appended to by a thread of its own, so that a slow disk never stops the event loop. Bounded in size and number.

Several processes may append to the one file; whoever finds it too large rotates it under a lock, the others notice by the inode.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llmd.observability.files import open_append

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 2**20
KEEP: Final = 4
"""Older files: NAME.1 is the newest of them."""
MAX_WAITING: Final = 10_000
"""Lines in memory at most; further ones are dropped and counted."""

#: A line, or what makes one, in the thread.
Line = str | Callable[[], str]


class LineFile:
    """`put` never blocks. `what`: for messages."""

    def __init__(self, path: Path, what: str, *, mode: int = 0o640, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._what = what
        self._mode = mode
        self._max_bytes = max_bytes
        self._lines: queue.Queue[Line | None] = queue.Queue(MAX_WAITING)
        self._file: int | None = None
        self._warned = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=what.replace(" ", "-"), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is waiting, for at most a second."""
        if not self._thread.ident:
            return
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(timeout=1)

    def put(self, line: Line) -> None:
        """Append a line, without its end."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        ending = False
        while not ending:
            batch = [self._lines.get()]
            while len(batch) < 1000:
                try:
                    batch.append(self._lines.get_nowait())
                except queue.Empty:
                    break
            ending = None in batch
            lines = [self._made(line) for line in batch if line is not None]
            if lines:
                self._append(("\n".join(lines) + "\n").encode("utf-8", "replace"))
        if self._file is not None:
            os.close(self._file)

    def _made(self, line: Line) -> str:
        return line if isinstance(line, str) else line()

    def _append(self, data: bytes) -> None:
        try:
            file = self._current()
            os.write(file, data)
            if os.fstat(file).st_size >= self._max_bytes:
                self._rotate()
        except OSError as error:
            self.dropped += data.count(b"\n")
            if not self._warned:
                self._warned = True
                log.warning("the %s cannot be written: %s: %s", self._what, self._path, error.strerror)

    def _current(self) -> int:
        """The open file, opened anew when another process has rotated it or someone removed it."""
        if self._file is not None:
            try:
                if os.stat(self._path).st_ino == os.fstat(self._file).st_ino:
                    return self._file
            except FileNotFoundError:
                pass
            os.close(self._file)
            self._file = None
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._file = open_append(self._path, self._mode)
        if os.fstat(self._file).st_mode & 0o777 & ~self._mode:
            os.fchmod(self._file, self._mode)
        return self._file

    def _rotate(self) -> None:
        lock = open_append(self._path.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.stat(self._path).st_size < self._max_bytes:
                return
            for n in range(KEEP - 1, 0, -1):
                older = Path(f"{self._path}.{n}")
                if older.exists():
                    older.replace(f"{self._path}.{n + 1}")
            self._path.replace(f"{self._path}.1")
        finally:
            os.close(lock)
