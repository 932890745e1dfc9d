"""STATE/audit.jsonl: one line for each administrative change, refused ones included. Never a secret, never a prompt.

Bounded: a full file becomes audit.jsonl.1, the oldest of which goes. Line numbers do not exist: what is read is read by time.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from llmd.observability.files import open_append

log = logging.getLogger(__name__)

#: Lines that are kept for a disk that is full.
MAX_KEPT = 1000

#: Bytes of one file, and older files beside it.
MAX_BYTES = 8 * 2**20
OLDER = 4

#: Bytes that a reader looks at, from the end.
READ_BYTES = 2**20


class AuditFile:
    """Appends lines, each in one write, so that they never mix. What cannot be written is in the log, and is tried again with the next line."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque(maxlen=MAX_KEPT)
        self._lock = threading.Lock()

    @property
    def owes(self) -> bool:
        """Whether lines wait to be written."""
        return bool(self._kept)

    def append(self, data: bytes = b"") -> None:
        """Write what was kept, then `data`. Never raises: the change has happened already."""
        with self._lock:
            if data:
                self._kept.append(data)
            try:
                self._write()
            except OSError as error:
                if data:
                    why = error.strerror or str(error)
                    log.error("cannot write to %s (%s), the line is kept: %s", self._path, why, data.decode().strip())

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = open_append(self._path)
        try:
            while self._kept:
                size = os.fstat(descriptor).st_size
                if os.write(descriptor, self._kept[0]) < len(self._kept[0]):
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._kept.popleft()
            full = os.fstat(descriptor).st_size >= self._max_bytes
        finally:
            os.close(descriptor)
        if full:
            self._rotate()

    def _rotate(self) -> None:
        for number in range(OLDER - 1, 0, -1):
            older = Path(f"{self._path}.{number}")
            if older.exists():
                older.replace(f"{self._path}.{number + 1}")
        self._path.replace(f"{self._path}.1")

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The last `count` lines at most, newest first; those that wait for the disk too. Blocking; damaged lines are left out."""
        with self._lock:
            waiting = list(self._kept)
        found: list[dict[str, Any]] = []
        for path in (None, self._path, Path(f"{self._path}.1")):
            data = _tail(path) if path is not None else b"".join(waiting)
            found += [entry for text in reversed(data.splitlines()) if (entry := _entry(text)) is not None]
            if len(found) >= count:
                break
        return found[:count]


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - READ_BYTES)
            stream.seek(start)
            data = stream.read(READ_BYTES)
    except OSError:
        return b""
    return data.partition(b"\n")[2] if start else data


def _entry(text: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
