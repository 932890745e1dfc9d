"""`AccessLog`: LOG/access.log, one line a request, written by a thread of its own, so that a slow disk never stops the event loop.

Several frontends append to the one file; whoever finds it too large rotates it under a lock, the others notice by the inode.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, Final

from llmd.frontend.exchange import Exchange, Scope
from llmd.observability.files import open_append

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 2**20
KEEP: Final = 4
"""Older files: access.log.1 is the newest of them."""
MAX_WAITING: Final = 10_000
"""Lines in memory at most; further ones are dropped and counted."""
MAX_PATH: Final = 256


class AccessLog:
    """`write` never blocks. `exclude`: paths whose 2xx answers are left out, whole segments only."""

    def __init__(self, path: Path, *, role: str, exclude: tuple[str, ...], as_json: bool, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._role = role
        self.exclude(exclude)
        self._as_json = as_json
        self._max_bytes = max_bytes
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._file: int | None = None
        self._warned = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)

    def exclude(self, paths: tuple[str, ...]) -> None:
        """Leave these out from now on."""
        self._exclude = tuple(prefix.rstrip("/") for prefix in paths)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is waiting, for at most a second."""
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(timeout=1)

    def write(self, scope: Scope, exchange: Exchange) -> None:
        """Note one request that is over."""
        if self._excluded(scope["path"], exchange.status):
            return
        try:
            self._lines.put_nowait(self._line(scope, exchange))
        except queue.Full:
            self.dropped += 1

    def _excluded(self, path: str, status: int) -> bool:
        if not 200 <= status < 300:
            return False
        return any(path == prefix or path.startswith(prefix + "/") for prefix in self._exclude)

    def _line(self, scope: Scope, exchange: Exchange) -> str:
        now = time.time()
        path = scope["path"][:MAX_PATH]
        client = scope.get("client")
        fields: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z",
            "level": "info",
            "role": self._role,
            "pid": os.getpid(),
            "msg": f"{scope['method']} {path} {exchange.status}",
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": path,
            "status": exchange.status,
            "duration_s": round(time.monotonic() - exchange.started, 4),
            "key": exchange.key or None,
            "request_id": exchange.request_id or None,
            "rid": exchange.rid or None,
            "outcome": exchange.outcome,
            "prompt_tokens": exchange.prompt_tokens,
            "completion_tokens": exchange.completion_tokens,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        if self._as_json:
            return json.dumps(fields)
        rest = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items() if name not in ("ts", "level", "msg", "method", "path", "status"))
        return f"{fields['ts']} {json.dumps(fields['msg'])[1:-1]} {rest}"

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
            lines = [line for line in batch if line is not None]
            if lines:
                self._append(("\n".join(lines) + "\n").encode())
        if self._file is not None:
            os.close(self._file)

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
                log.warning("the access log cannot be written: %s: %s", self._path, error.strerror)

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
        self._file = open_append(self._path)
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
