"""STATE/crashes/*.json: one record for each process that ended though nobody wanted it to. Bounded in number; no prompts.

Written by the supervisor, which sees every death, whoever else is away. `GET /v1/crashes` and `llmctl crashes` show them.
A disk that refuses costs one line of log, never a restart: the newest records wait in memory, shortened, until it takes them.
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
#: Records that wait for a disk, what each keeps of its lines, and seconds between two tries.
MAX_UNWRITTEN, SHORT_LINES, SHORT_STACK_LINES, SHORT_LINE, TRY_AGAIN = 5, 10, 30, 300, 30.0
_STACK = re.compile(r'^(Thread 0x|Current thread|Fatal Python error|Extension modules|  File "|  <|Python runtime state|\s*$)')


class CrashFiles:
    """The directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._unwritten: list[dict[str, Any]] = []
        self._tried_at = 0.0

    def write(self, facts: dict[str, Any], lines: list[str], wall: float) -> str:
        """Keep one record; `lines`: the last that the process wrote. Returns its id, empty when it waits in memory."""
        self._count += 1
        number = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(wall))}-{facts['process']}-{facts['pid']}-{self._count}"
        stacks, said = split_stacks(lines)
        record = {"id": number, "at": round(wall, 3), **facts, "stacks": stacks[:MAX_STACK_LINES], "last_lines": said[-MAX_LINES:]}
        try:
            self._put(record)
            self._prune()
        except OSError as error:
            log.warning("the record of a crash could not be written to %s: %s", self._directory, error.strerror)
            self._unwritten = [*self._unwritten, _shortened(record)][-MAX_UNWRITTEN:]
            return ""
        return number

    def unwritten(self, now: float) -> list[dict[str, Any]]:
        """The records that no disk has taken, oldest first; from time to time (`now`: monotonic) it is tried again."""
        if self._unwritten and now - self._tried_at >= TRY_AGAIN:
            self._tried_at = now
            with contextlib.suppress(OSError):
                while self._unwritten:
                    self._put(self._unwritten[0])
                    del self._unwritten[0]
                self._prune()
                log.info("records of crashes are written again")
        return list(self._unwritten)

    def _put(self, record: dict[str, Any]) -> None:
        """Write one record, as a whole or not at all. Raises OSError."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        path = self._directory / f"{record['id']}.json"
        aside = path.with_suffix(".new")
        try:
            aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise

    def _prune(self) -> None:
        for path in sorted(self._directory.glob("*.json"))[:-MAX_RECORDS]:
            with contextlib.suppress(OSError):
                path.unlink()


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record that is small enough to travel with every report: its innermost frames and its last lines."""
    stacks = [line[:SHORT_LINE] for line in record["stacks"][:SHORT_STACK_LINES]]
    return {**record, "stacks": stacks, "last_lines": [line[:SHORT_LINE] for line in record["last_lines"][-SHORT_LINES:]]}


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
