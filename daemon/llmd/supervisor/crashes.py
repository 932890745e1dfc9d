"""STATE/crashes/*.json: one record for each process that ended though nobody wanted it to. Bounded in number; no prompts.

Written by the supervisor, which sees every death, whoever else is away. `GET /v1/crashes` and `llmctl crashes` show them.
A disk that refuses costs the record and one line of log, never a restart.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

#: Records that are kept; the oldest go.
MAX_RECORDS = 50
#: Lines of log, and of stacks, in one record.
MAX_LINES, MAX_STACK_LINES = 40, 200
_STACK = re.compile(r'^(Thread 0x|Current thread|Fatal Python error|Extension modules|  File "|  <|Python runtime state|\s*$)')


class CrashFiles:
    """The directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def write(self, facts: dict[str, Any], lines: list[str], wall: float) -> str:
        """Keep one record; `lines`: the last that the process wrote. Returns its id, empty when it could not be written."""
        self._count += 1
        number = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(wall))}-{facts['process']}-{facts['pid']}-{self._count}"
        stacks, said = split_stacks(lines)
        record = {"id": number, "at": round(wall, 3), **facts, "stacks": stacks[:MAX_STACK_LINES], "last_lines": said[-MAX_LINES:]}
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            path = self._directory / f"{number}.json"
            aside = path.with_suffix(".new")
            aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            aside.replace(path)
            self._prune()
        except OSError as error:
            log.warning("the record of a crash could not be written to %s: %s", self._directory, error.strerror)
            return ""
        return number

    def _prune(self) -> None:
        for path in sorted(self._directory.glob("*.json"))[:-MAX_RECORDS]:
            with contextlib.suppress(OSError):
                path.unlink()


def split_stacks(lines: list[str]) -> tuple[list[str], list[str]]:
    """(lines of Python stacks as faulthandler writes them, all others)."""
    stacks: list[str] = []
    said: list[str] = []
    for line in lines:
        if _STACK.match(line):
            if line.strip():
                stacks.append(line)
        else:
            said.append(line)
    return stacks, said
