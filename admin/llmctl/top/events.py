"""The fifth tab: what has happened, and what the processes log."""

from __future__ import annotations

import re
from typing import Any, Final

from textual.app import ComposeResult
from textual.containers import Vertical

from llmctl.output import one_line, when
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.lines import Cells, Lines
from llmctl.top.pane import Pane

#: Cells from which on there is room for what is said by colour or context too.
_ROOMY: Final = 56
_LOG: Final = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)\S* (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)", re.DOTALL)


class EventLines(Lines):
    """What has happened."""

    def day(self, line: dict[str, Any]) -> str:
        return when(line.get("at"))[:10]

    def plain(self, line: dict[str, Any]) -> str:
        return f"{line.get('kind')} {line.get('message')}"

    def drawn(self, line: dict[str, Any]) -> Cells:
        hue = words.SEVERITIES.get(str(line.get("severity")), "foreground")
        cells = ((words.clock_time(line.get("at")), "muted", 8), (one_line(line.get("kind")), "muted", 9), (one_line(line.get("message")), hue, 0))
        return cells if self.size.width > _ROOMY else (cells[0], cells[2])


class LogLines(Lines):
    """Log lines of all processes."""

    def day(self, line: str) -> str:
        match = _LOG.match(line)
        return match[1] if match else ""

    def plain(self, line: str) -> str:
        return line

    def drawn(self, line: str) -> Cells:
        match = _LOG.match(line)
        if match is None:
            return ((one_line(line), "muted", 0),)
        level = match[3].lower()
        hue = words.SEVERITIES.get(level, "foreground")
        cells = ((match[2], "muted", 8), (level, hue if hue != "foreground" else "muted", 9), (one_line(match[4]), hue, 0))
        return cells if self.size.width > _ROOMY else (cells[0], cells[2])


class Events(Pane):
    """Events above, the log below."""

    def compose(self) -> ComposeResult:
        for name, kind in (("events", EventLines), ("log", LogLines)):
            with Vertical(classes="box", id=name) as box:
                box.border_title = name
                yield kind(id=f"{name}-lines")

    def show(self, picture: Picture, feed: Feed) -> None:
        self.query_one(EventLines).show(picture.events)
        self.query_one(LogLines).show(picture.logs)
        self.query_one("#log").border_subtitle = "" if picture.logs else "nothing can be read from here; llmctl logs says why"
