"""Lines of log as they leave llmd: what is none of ours, such as a traceback at import or a message of the C library, is made one.

In JSON every line becomes one object with ts, level, role, pid, msg; in text a foreign line gets the name of its process in front.
"""

from __future__ import annotations

import json
import re
import time
from typing import Final

import msgspec
from msgspec import Struct

#: Level of a line that says none: native output is rare, and mostly bad news.
FOREIGN_LEVEL: Final = "warning"

_STAMPED: Final = re.compile(rb"\d{4}-\d\d-\d\dT")
#: What goes before the message in a line of text.
_HEAD: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ +[a-z-]+(-\d+)?: ")
_LAST_FRAMES: Final = 6


class _Line(Struct):
    ts: str
    level: str
    role: str
    pid: int
    msg: str
    traceback: str = ""


_decoder: Final = msgspec.json.Decoder(_Line)


class LineWrapper:
    """Makes whole lines of one process fit the log."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def wrap(self, name: str, pid: int, lines: bytes) -> bytes:
        """`lines` (each with its end) of process `name`, each one a line of log. Empty ones are left out."""
        return b"".join(self._wrapped(name, pid, line) for line in lines.split(b"\n") if line.strip())

    def note(self, text: str, name: str = "supervisor", pid: int = 0) -> bytes:
        """A line of llmd's own that cannot take the way of logging."""
        return self._json(name, pid, text) if self._as_json else f"llmd: {text}\n".encode()

    def _wrapped(self, name: str, pid: int, line: bytes) -> bytes:
        if not self._as_json:
            return (line if _STAMPED.match(line) else name.encode() + b"| " + line) + b"\n"
        if line.startswith(b"{") and _parsed(line) is not None:
            return line + b"\n"
        return self._json(name, pid, line.decode("utf-8", "replace"))

    @staticmethod
    def _json(name: str, pid: int, text: str) -> bytes:
        fields = {"ts": timestamp(time.time()), "level": FOREIGN_LEVEL, "role": name, "pid": pid, "logger": "stderr", "msg": text}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def timestamp(seconds: float) -> str:
    """UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"


def words(line: str) -> list[str]:
    """What a line of log says, without its wrapping: the message, and the end of a traceback."""
    parsed = _parsed(line.encode("utf-8", "replace")) if line.startswith("{") else None
    if parsed is None:
        return [line]
    frames = [frame for frame in parsed.traceback.splitlines() if frame.strip()]
    return [*parsed.msg.splitlines(), *frames[-_LAST_FRAMES:]]


def message(line: str) -> str:
    """A line of text without its time, level and process."""
    return line[match.end() :] if (match := _HEAD.match(line)) else line


def telling(lines: list[str]) -> list[str]:
    """Of the last lines of a process those that may say why it ended: WARNING and worse and what is none of ours; all, if there are none."""
    return [line for line in lines if not _is_routine(line)] or lines


def _is_routine(line: str) -> bool:
    parsed = _parsed(line.encode("utf-8", "replace")) if line.startswith("{") else None
    if parsed is not None:
        return parsed.level in ("debug", "info")
    return _STAMPED.match(line.encode("utf-8", "replace")) is not None and line.split(maxsplit=2)[1:2] in (["DEBUG"], ["INFO"])


def _parsed(line: bytes) -> _Line | None:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
