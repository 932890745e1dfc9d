"""Show the last log lines of all processes in the order of time, or of those named, like `scheduler-0`.

Reads the files in log_dir; under systemd the journal has the same lines (`journalctl -u llmd`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

from llmctl import exits, find
from llmctl.context import Context
from llmctl.exits import CtlError

_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
TAIL_BYTES = 1 << 20
FOLLOW_EVERY = 0.2


def run(context: Context) -> int:
    directory = _directory(context)
    files = _files(directory, context.options.process)
    if not files:
        known = ", ".join(path.stem for path in _files(directory, [])) or "none"
        raise CtlError(exits.FAILED, f"no such log in {directory}; there are: {known}", "with --dir, or under systemd: journalctl -u llmd")
    ends = {path: path.stat().st_size for path in files}
    lines = sorted((line for path in files for line in _tail(path, ends[path])), key=lambda line: line[0])
    for _, text in lines[-context.options.lines :] if context.options.lines > 0 else ():
        context.out.line(_pretty(context, text))
    while context.options.follow:
        _more(context, directory, ends)
        time.sleep(FOLLOW_EVERY)
    return exits.OK


def _directory(context: Context) -> Path:
    if context.options.dir:
        return Path(context.options.dir)
    place = find.choose(context.client.candidates)
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


def _files(directory: Path, wanted: list[str]) -> list[Path]:
    return [path for path in sorted(directory.glob("*.log")) if not wanted or path.stem in wanted or path.stem.rpartition("-")[0] in wanted]


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


def _more(context: Context, directory: Path, ends: dict[Path, int]) -> None:
    for path in _files(directory, context.options.process):
        seen, size = ends.get(path, 0), path.stat().st_size
        if size < seen:
            seen = 0  # a new file after rotation
        if size > seen:
            with path.open("rb") as stream:
                stream.seek(seen)
                whole, newline, _ = stream.read(TAIL_BYTES).rpartition(b"\n")
            ends[path] = seen + len(whole) + len(newline)
            for line in whole.decode("utf-8", "replace").splitlines():
                context.out.line(_pretty(context, line))


def _pretty(context: Context, line: str) -> str:
    """A JSON line as people read it; `-o json` leaves it as it is."""
    if not context.out.is_table or not line.startswith("{"):
        return "".join(char if char.isprintable() or char == "\t" else "?" for char in line)
    try:
        fields: dict[str, Any] = json.loads(line)
        text = f"{fields['ts']} {str(fields['level']).upper():<7} {fields['role']}: {fields['msg']}"
    except (ValueError, KeyError, TypeError):
        return line
    rest = {key: value for key, value in fields.items() if key not in ("ts", "level", "role", "pid", "logger", "msg", "traceback")}
    extras = "".join(f" {key}={value}" for key, value in rest.items())
    return "".join(char if char.isprintable() else " " for char in text + extras) + (f"\n{fields['traceback']}" if "traceback" in fields else "")
