"""STATE/crashes: the records that the supervisor keeps of processes that ended though nobody wanted it to."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec


def newest(directory: Path, count: int) -> list[dict[str, Any]]:
    """The newest `count` records, newest first. What cannot be read is left out. Blocks."""
    records = []
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("*.json"), reverse=True)[:count]:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                records.append(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    return records
