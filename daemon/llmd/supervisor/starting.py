"""Tells how far the start is while there is no control to tell it: to systemd, to the terminal, to whoever has embedded llmd."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llmd.supervisor.facts import Report
from llmd.supervisor.logsink import LogSink
from llmd.supervisor.notify import Notifier

log = logging.getLogger("llmd.supervisor")

OnStage = Callable[[str], None]

_BAR = 28


class Starting:
    """`limit`: seconds that a start may be without progress."""

    def __init__(self, notifier: Notifier, sink: LogSink, limit: float, on_stage: OnStage | None = None) -> None:
        self._notifier = notifier
        self._sink = sink
        self._limit = limit
        self._on_stage = on_stage
        self.stage = "starting"

    def at(self, stage: str) -> None:
        """The next thing is being done."""
        self.stage = stage
        if self._on_stage is not None:
            self._on_stage(stage)
        self._progress(f"starting: {stage}")

    def output(self, line: str) -> None:
        """A child that works for the start has said something."""
        log.info("%s", line)
        self._progress(f"starting: {line}")

    def _progress(self, text: str) -> None:
        self._notifier.status(text)
        self._notifier.extend(self._limit)
        self._sink.show(bar(text, 0.0))


class Steps:
    """Shows what control says of a start: a bar on a terminal, elsewhere a line for each stage and each quarter of it."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink
        self._seen: set[tuple[str, int]] = set()

    def take(self, report: Report) -> None:
        """One report."""
        text = f"{report.state}: {report.stage}" if report.stage else report.state
        self._sink.show("" if report.ready else bar(text, report.progress))
        step = (report.stage.partition(",")[0], int(report.progress * 4))
        if report.stage and step not in self._seen:
            self._seen.add(step)
            log.log(logging.DEBUG if self._sink.terminal else logging.INFO, "%s", report.status or report.stage)


def bar(text: str, share: float, width: int = 100) -> str:
    """`text` with a bar where a share of it is known; fits on a line of `width`."""
    if not 0 < share < 1:
        return text[: width - 4] + " ..." if text else ""
    full = int(share * _BAR)
    return f"[{'#' * full}{'-' * (_BAR - full)}] {share:4.0%} {text}"[:width]
