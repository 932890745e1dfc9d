"""Log lines of every process: to stderr, one line each, as text or as one JSON object with ts, level, role, pid, msg."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from llmd.observability.lines import timestamp

#: Loggers of libraries that say too much.
_NOISY = ("httpx", "httpcore", "asyncio", "uvicorn.access")
#: Attributes of a record that become fields of a JSON line (logging's `extra=`).
FIELDS = ("request_id", "rid", "epoch", "operation_id")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; newlines and quotes in a message cannot forge another line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": timestamp(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": os.getpid(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """For people: time, level, role, message."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n") if not record.exc_info else record.getMessage()
        extras = "".join(f" {name}={getattr(record, name)}" for name in FIELDS if hasattr(record, name))
        line = f"{timestamp(record.created)} {record.levelname:<7} {self._role}: {message}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setup(role: str, level: str, log_format: str) -> None:
    """Send this process's log to stderr. `log_format` auto: text on a terminal, else json."""
    json_lines = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if json_lines else TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """In the end logging is set up as it was before: for a process that llmd only borrows."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
