"""The Engine's line to the admin plane of its own llmd: one HTTP request over the private unix socket, in the caller's thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from pathlib import Path
from typing import Any

from llmd.errors import RequestError


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("llmd", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: Path, method: str, target: str, body: dict[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
    """The answer as JSON. Raises RequestError: the plane's own, or `engine_unavailable` where it does not answer."""
    with contextlib.closing(_Connection(path, timeout)) as connection:
        try:
            connection.request(method, target, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"llmd does not answer: {error}", code="engine_unavailable") from None
    if response.status >= 400:
        told = answer.get("error") or {}
        raise RequestError(told.get("message") or f"status {response.status}", code=told.get("code"), param=told.get("param"), status=response.status)
    assert isinstance(answer, dict)
    return answer
