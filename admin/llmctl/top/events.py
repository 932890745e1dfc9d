"""The fifth tab: what has happened, and what the processes log."""

from __future__ import annotations

import calendar
import re
import time
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical

from llmctl.output import one_line
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.panes import Pane
from llmctl.top.widgets import Lines


class EventLines(Lines):
    """What has happened."""

    def plain(self, line: dict[str, Any]) -> str:
        return f"{line.get('kind')} {line.get('message')}"

    def drawn(self, line: dict[str, Any]) -> RenderableType:
        hue = {"error": "error", "warning": "warning"}.get(str(line.get("severity")), "foreground")
        cells = [(words.clock_time(line.get("at")), "muted", 8), (one_line(line.get("kind")), "muted", 9), (one_line(line.get("message")), hue, 0)]
        return self.columns(*(cells if self.size.width > _ROOMY else [cells[0], cells[2]]))


_LOG: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\S* (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)", re.DOTALL)
#: Cells from which on there is room for what is said by colour or context too.
_ROOMY: Final = 56


class LogLines(Lines):
    """Log lines of all processes."""

    def plain(self, line: str) -> str:
        return line

    def drawn(self, line: str) -> RenderableType:
        match = _LOG.match(line)
        if match is None:
            return Text(one_line(line), self.colour("muted"))
        level = match[2]
        hue = {"ERROR": "error", "CRITICAL": "error", "WARNING": "warning"}.get(level, "foreground")
        at = words.clock_time(calendar.timegm(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")))
        cells = [(at, "muted", 8), (level.lower(), hue if hue != "foreground" else "muted", 9), (one_line(match[3]), hue, 0)]
        return self.columns(*(cells if self.size.width > _ROOMY else [cells[0], cells[2]]))


class Events(Pane):
    """Events above, the log below."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "events"
            yield EventLines(id="event-lines")
        with Vertical(classes="box", id="log") as box:
            box.border_title = "log"
            yield LogLines(id="log-lines")

    def show(self, picture: Picture, feed: Feed) -> None:
        self.query_one(EventLines).show(picture.events)
        self.query_one(LogLines).show(picture.logs)
        self.query_one("#log").border_subtitle = "" if picture.logs else "nothing can be read from here; llmctl logs says why"
