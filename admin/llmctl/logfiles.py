"""Reads the daemon's log files: where they are, their last lines in the order of time, what comes after, and how a line looks to people."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from pathlib import Path
from typing import Any, Final

from llmctl import exits, find
from llmctl.client import Client
from llmctl.exits import CtlError

_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
TAIL_BYTES: Final = 1 << 20


def directory(client: Client) -> Path:
    """Where the daemon that `client` finds writes its logs. Raises CtlError."""
    place = find.choose(client.candidates)
    known = place.lock.get("log_dir") if place else None
    if place is not None and not isinstance(known, str):
        # Another daemon's log would be worse than none.
        raise CtlError(exits.NOT_ANSWERING, f"the daemon in {place.run_dir} does not say where its logs are", "say where with --dir")
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
    candidates = [Path(known)] if isinstance(known, str) else [Path("/var/log/llmd"), Path(home) / "llmd/log"]
    for path in candidates:
        if path.is_dir():
            return path
    raise CtlError(exits.NOT_RUNNING, f"no log directory at {', '.join(map(str, candidates))}", "say where with --dir, or under systemd: journalctl -u llmd")


class Logs:
    """The logs in one directory, of the processes or roles in `wanted`, or of all but those in `without`."""

    def __init__(self, where: Path, wanted: list[str] | None = None, without: tuple[str, ...] = ()) -> None:
        self.where = where
        self._wanted = wanted or []
        self._without = without
        self._ends: dict[Path, int] = {}

    def files(self) -> list[Path]:
        """Those that there are now."""
        found = [path for path in sorted(self.where.glob("*.log")) if path.stem not in self._without]
        return [path for path in found if not self._wanted or path.stem in self._wanted or path.stem.rpartition("-")[0] in self._wanted]

    def last(self, count: int) -> list[str]:
        """The last `count` lines in the order of time; `more` goes on after them."""
        self._ends = {path: path.stat().st_size for path in self.files()}
        lines = sorted((line for path, end in self._ends.items() for line in _tail(path, end)), key=lambda line: line[0])
        return [text for _, text in lines[-count:]] if count > 0 else []

    def more(self, *, newest: bool = False) -> list[str]:
        """Whole lines that have come since; a line that does not end within TAIL_BYTES comes in pieces. `newest`: where more has come than is read at
        once, what is older is left out, for a reader who would never catch up."""
        lines: list[str] = []
        for path in self.files():
            seen, size = self._ends.get(path, 0), path.stat().st_size
            if size < seen:
                seen = 0  # a new file after rotation
            if newest:
                seen = max(seen, size - TAIL_BYTES)
            if size > seen:
                with path.open("rb") as stream:
                    stream.seek(seen)
                    read = stream.read(TAIL_BYTES)
                whole, newline, _ = read.rpartition(b"\n")
                if not newline and len(read) == TAIL_BYTES:
                    whole = read
                self._ends[path] = seen + len(whole) + len(newline)
                lines += whole.decode("utf-8", "replace").splitlines()
        return lines


def _tail(path: Path, end: int) -> list[tuple[str, str]]:
    """(time, line) of a file's last lines; a line without a time belongs to the one before it."""
    with path.open("rb") as stream:
        stream.seek(max(0, end - TAIL_BYTES))
        text = stream.read(TAIL_BYTES).decode("utf-8", "replace")
    lines = deque(text.splitlines())
    if end > TAIL_BYTES and lines:
        lines.popleft()
    stamped, last = [], ""
    for line in lines:
        match = _TIME.search(line[:40])
        last = match[0] if match else last
        stamped.append((last, line))
    return stamped


def raw(line: str) -> str:
    """As it is written, without what a terminal would take for a command."""
    return "".join(char if char.isprintable() or char == "\t" else "?" for char in line)


def pretty(line: str) -> str:
    """A JSON line as people read it."""
    if not line.startswith("{"):
        return raw(line)
    try:
        fields: dict[str, Any] = json.loads(line)
        text = f"{fields['ts']} {str(fields['level']).upper():<7} {fields['role']}: {fields['msg']}"
    except (ValueError, KeyError, TypeError):
        return raw(line)
    rest = {key: value for key, value in fields.items() if key not in ("ts", "level", "role", "pid", "logger", "msg", "traceback")}
    extras = "".join(f" {key}={value}" for key, value in rest.items())
    return "".join(char if char.isprintable() else " " for char in text + extras) + (f"\n{fields['traceback']}" if "traceback" in fields else "")
