"""`AccessLog`: LOG/access.log, one line a request. Several frontends append to the one file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

from llmd.frontend.exchange import Exchange, Scope
from llmd.frontend.line_file import MAX_BYTES, LineFile

MAX_PATH: Final = 256


class AccessLog:
    """`write` never blocks. `exclude`: paths whose 2xx answers are left out, whole segments only."""

    def __init__(self, path: Path, *, role: str, exclude: tuple[str, ...], as_json: bool, max_bytes: int = MAX_BYTES) -> None:
        self._role = role
        self.exclude(exclude)
        self._as_json = as_json
        self._file = LineFile(path, "access log", max_bytes=max_bytes)

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self._file.dropped

    def exclude(self, paths: tuple[str, ...]) -> None:
        """Leave these out from now on."""
        self._exclude = tuple(prefix.rstrip("/") for prefix in paths)

    def start(self) -> None:
        self._file.start()

    def close(self) -> None:
        """Write what is waiting, for at most a second."""
        self._file.close()

    def write(self, scope: Scope, exchange: Exchange) -> None:
        """Note one request that is over."""
        if self._excluded(scope["path"], exchange.status):
            return
        self._file.put(self._line(scope, exchange))

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
