"""What can only be changed in supervisord's modules themselves: three names, replaced once, in the main process alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from supervisor import dispatchers, events, process

from llmd.supervisor.logsink import LogSink


class SteadyClock:
    """supervisord's deadlines use the wall clock; this one starts at the wall clock's time and then runs evenly."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def time(self) -> float:
        return self._offset + time.monotonic()


def apply(sink: LogSink, exit_code: Callable[[int], int | None]) -> None:
    """Send children's output to `sink`; add the exit status to the EXITED event; steady the clock."""

    def to_sink(dispatcher: Any, data: bytes) -> None:
        if data:
            sink.feed(dispatcher.process.config.name, data, dispatcher.process.pid or 0)

    def extra_values(event: Any) -> list[tuple[str, object]]:
        pid = event.process.pid
        return [("expected", int(event.expected)), ("pid", pid), ("status", exit_code(pid))]

    dispatchers.POutputDispatcher._log = to_sink
    events.ProcessStateExitedEvent.get_extra_values = extra_values
    process.time = SteadyClock()
