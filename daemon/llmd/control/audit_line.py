"""One line of the audit: who asked for what, what it changed, how it ended and why. Bounded, whatever was asked for."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from llmd.control.operation import Operation
from llmd.control.peer import Peer
from llmd.errors import RequestError

#: Characters of one text, entries of one object or list, and levels of these that a line keeps of what a caller sent and of what came of it.
MAX_TEXT: Final = 1000
MAX_ENTRIES: Final = 50
MAX_DEPTH: Final = 4
#: Characters of a verb that nobody knows.
MAX_VERB: Final = 64


def line(peer: Peer, verb: str, params: dict[str, Any], reason: str, operation: Operation | None, error: RequestError | None) -> bytes:
    """One line. `operation` None: it was refused before it began; `error` None: it has succeeded."""
    return (
        msgspec.json.encode(
            {
                "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "uid": peer.uid,
                "gid": peer.gid,
                "pid": peer.pid,
                "loginuid": peer.loginuid,
                "key": peer.key,
                "address": peer.address,
                "verb": verb[:MAX_VERB],
                "params": bounded(params),
                "reason": reason,
                "changes": bounded(msgspec.to_builtins(operation.changes)) if operation else [],
                "data": bounded(operation.data) if operation else {},
                "result": operation.state if operation else "refused",
                "code": error.code if error else None,
                "message": bounded(error.message) if error else "",
                "operation_id": operation.id if operation else None,
            }
        )
        + b"\n"
    )


def bounded(value: Any, depth: int = MAX_DEPTH) -> Any:
    """`value` with its long texts and lists cut, and a word where something is missing."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} characters)"
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return "..."
    rest = len(value) - MAX_ENTRIES
    if isinstance(value, list):
        return [bounded(item, depth - 1) for item in value[:MAX_ENTRIES]] + ([f"... and {rest} more"] if rest > 0 else [])
    kept = {bounded(str(name)): bounded(item, depth - 1) for name, item in list(value.items())[:MAX_ENTRIES]}
    return kept | ({"...": f"and {rest} more"} if rest > 0 else {})
