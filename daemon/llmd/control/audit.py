"""STATE/audit.jsonl: one line for each administrative change, refused ones included. Never a secret, never a prompt."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from llmd.control.peer import Peer
from llmd.observability.files import open_append

log = logging.getLogger(__name__)

#: Lines that are kept for a disk that is full.
MAX_KEPT = 1000


def line(peer: Peer, verb: str, params: dict[str, Any], reason: str, result: str, code: str | None, operation_id: str | None) -> bytes:
    """One audit line."""
    return (
        msgspec.json.encode(
            {
                "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "uid": peer.uid,
                "gid": peer.gid,
                "pid": peer.pid,
                "loginuid": peer.loginuid,
                "verb": verb,
                "params": params,
                "reason": reason,
                "result": result,
                "code": code,
                "operation_id": operation_id,
            }
        )
        + b"\n"
    )


class AuditFile:
    """Appends lines, each in one write, so that they never mix. What cannot be written is in the log, and is tried again with the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        finally:
            os.close(descriptor)
