"""What can only be changed in supervisord's modules themselves: four names, replaced once, in the main process alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from supervisor import dispatchers, events, process
from supervisor.medusa import asyncore_25 as asyncore

from llmd.supervisor.logsink import LogSink

log = logging.getLogger(__name__)


class SteadyClock:
    """supervisord's deadlines use the wall clock; this one starts at the wall clock's time and then runs evenly."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def time(self) -> float:
        return self._offset + time.monotonic()


def apply(sink: LogSink, exit_code: Callable[[int], int | None]) -> None:
    """Send children's output to `sink`; add the exit status to the EXITED event; steady the clock; print nothing."""

    def to_sink(dispatcher: Any, data: bytes) -> None:
        if data:
            sink.feed(dispatcher.process.config.name, data, dispatcher.process.pid or 0)

    def extra_values(event: Any) -> list[tuple[str, object]]:
        pid = event.process.pid
        return [("expected", int(event.expected)), ("pid", pid), ("status", exit_code(pid))]

    def to_log(dispatcher: Any, message: str, type: str = "info") -> None:
        log.debug("supervisord: %s: %s", type, message)

    dispatchers.POutputDispatcher._log = to_sink
    events.ProcessStateExitedEvent.get_extra_values = extra_values
    process.time = SteadyClock()
    asyncore.dispatcher.log_info = to_log
