"""supervisord's log, in llmd's: its chatter is debug, its troubles are warnings and errors."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("llmd.supervisor.supervisord")

#: Said at each start; the socket is 0600 in a directory of mode 0700, and llmd decides itself as whom it runs.
_EXPECTED = ("running without any HTTP authentication", "Supervisor is running as root")


class SupervisordLogger:
    """Has the methods of supervisor.loggers.Logger."""

    level = 0
    handlers: tuple[()] = ()

    def blather(self, msg: str, **kw: Any) -> None:
        """Finer than debug."""

    trace = blather

    def debug(self, msg: str, **kw: Any) -> None:
        log.debug("%s", _text(msg, kw))

    info = warn = debug

    def error(self, msg: str, **kw: Any) -> None:
        log.warning("%s", _text(msg, kw))

    def critical(self, msg: str, **kw: Any) -> None:
        if not any(part in str(msg) for part in _EXPECTED):
            log.error("%s", _text(msg, kw))

    def log(self, level: int, msg: str, **kw: Any) -> None:
        self.debug(msg, **kw)

    def close(self) -> None:
        """The handlers are llmd's."""


def _text(msg: str, kw: dict[str, Any]) -> str:
    return str(msg) % kw if kw else str(msg)
