"""STATE/crashes: the records that the supervisor keeps of processes that ended though nobody wanted it to, on disk or, where that is full, in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


def newest(directory: Path, count: int, unwritten: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The newest `count` records, newest first, `unwritten` ones among them. What cannot be read is left out. Blocks."""
    records = {str(record.get("id")): record for record in unwritten}
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("*.json"), reverse=True)[:count]:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
                records[path.stem] = record
    return [records[number] for number in sorted(records, reverse=True)[:count]]
