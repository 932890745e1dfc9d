"""STATE/audit.jsonl: one line for each administrative change, refused ones included. Never a secret, never a prompt."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from llmd.control.peer import Peer

log = logging.getLogger(__name__)


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


def append(path: Path, data: bytes) -> None:
    """Append in one write, so that lines never mix. A failure is logged: the change has happened already."""
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.error("cannot write the audit line to %s: %s", path, error)
