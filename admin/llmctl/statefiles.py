"""What llmd leaves in its state directory, read without it: the records of crashes, and the audit. Standard library only.

A daemon that is there is always asked first: it knows lines that its disk has not taken yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from llmctl import exits, find
from llmctl.client import Client
from llmctl.context import Context
from llmctl.exits import CtlError

#: Bytes of an audit file or of a record that are looked at, from the end.
READ_BYTES: Final = 1 << 20


def newest(context: Context, name: str, count: int) -> list[dict[str, Any]]:
    """The newest `count` of `crashes` or `audit`, newest first: the daemon's answer; where none runs here, its files, and a note. Raises CtlError."""
    try:
        answer: list[dict[str, Any]] = context.get(f"/v1/{name}", limit=count)[name]
    except CtlError as error:
        if error.status != exits.NOT_RUNNING or context.client.remote is not None:
            raise
        where = place(context.client, name)
        if where is None:
            looked = ", ".join(str(path) for path in looked_at(context.client, name))
            raise CtlError(error.status, f"{error.message}; nothing to read at {looked}", error.hint) from None
        context.note(f"llmctl: llmd is not running; this is what it left in {where}")
        return read(where, count)
    return answer


def looked_at(client: Client, name: str) -> list[Path]:
    """Where `crashes` or `audit` may lie: where the last daemon said, else in the usual state directories."""
    chosen = find.choose(client.candidates)
    known = chosen.lock.get("state_dir") if chosen is not None else None
    if isinstance(known, str) and known:
        directories = [Path(known)]
    else:
        home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
        directories = [Path(home) / "llmd", Path("/var/lib") / (f"llmd-{client.instance}" if client.instance else "llmd")]
    return [directory / ("crashes" if name == "crashes" else "audit.jsonl") for directory in directories]


def place(client: Client, name: str) -> Path | None:
    """The first of `looked_at` that can be read."""
    return next((path for path in looked_at(client, name) if os.access(path, os.R_OK | (os.X_OK if name == "crashes" else 0))), None)


def read(where: Path, count: int) -> list[dict[str, Any]]:
    """At most `count` records of a directory of crashes or of an audit file, newest first. What cannot be read is left out."""
    found: list[dict[str, Any]] = []
    for text in _records(where):
        if len(found) >= count:
            break
        try:
            entry = json.loads(text)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _records(where: Path) -> Iterable[bytes]:
    if where.is_dir():
        for path in sorted(where.glob("*.json"), reverse=True):
            yield _tail(path)
        return
    for path in (where, Path(f"{where}.1")):
        yield from reversed(_tail(path).splitlines())


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - READ_BYTES)
            stream.seek(start)
            data = stream.read(READ_BYTES)
    except OSError:
        return b""
    return data.partition(b"\n")[2] if start else data
