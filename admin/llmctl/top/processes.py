"""The second tab: every process, and what is known of the marked one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from llmctl.output import duration, one_line, size
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.pane import Table
from llmctl.top.tables import Column

#: Last words of a process, and events of it, that are shown.
_WORDS = 2
_EVENTS = 50


class Processes(Table):
    """See the module."""

    NAME = "process"
    TITLE = "processes"
    NOTHING = "no process is known yet"

    _picture = Picture()

    def columns(self) -> Sequence[Column]:
        return (
            Column("PROCESS", self.key, 13),
            Column("STATE", lambda row: row.get("state"), 9),
            Column("PID", lambda row: row.get("pid") or None, 8, True, lambda row: str(row.get("pid") or ""), since="-medium"),
            Column("UP", lambda row: row.get("uptime_s"), 7, True, lambda row: duration(row.get("uptime_s")), since="-medium"),
            Column("RESTARTS", lambda row: row.get("restarts"), 8, True),
            Column("HEARD", lambda row: row.get("heartbeat_age_s"), 6, True, lambda row: duration(row.get("heartbeat_age_s")), since="-medium"),
            Column("CPU", lambda row: self._picture.cpu.get(self.key(row)), 5, True, self._share),
            Column("MEMORY", lambda row: row.get("rss_bytes"), 8, True, lambda row: size(row.get("rss_bytes"))),
            Column("LAST EXIT", lambda row: (row.get("last_exit") or {}).get("age_s"), 0, False, words.exit_text, since="-wide"),
        )

    def key(self, row: dict[str, Any]) -> str:
        return f"{row.get('role')}-{row.get('rank')}"

    def _share(self, row: dict[str, Any]) -> str:
        share = self._picture.cpu.get(self.key(row))
        return "–" if share is None else f"{share:.0%}"

    def show(self, picture: Picture, feed: Feed) -> None:
        self._picture = picture
        self.draw(picture.status.get("processes") or [])

    def facts(self, row: dict[str, Any]) -> list[tuple[str, Text | str]]:
        muted = self.colour("muted")
        last = row.get("last_exit") or {}
        doing = [row.get("stage"), row.get("phase"), f"{row['steps']:,} steps" if row.get("steps") else ""]
        known: list[tuple[str, Text | str]] = [
            ("now", " · ".join(str(part) for part in doing if part) or str(row.get("state"))),
            ("last exit", words.exit_text(row) if last else "none: it is in its first life"),
        ]
        said = str(last.get("stderr") or "").splitlines()[-_WORDS:]
        known += [("its words" if number == 0 else "", Text(one_line(line), muted)) for number, line in enumerate(said)]
        events = [event for event in self._picture.events if (event.get("data") or {}).get("process") == self.key(row)][: -_EVENTS - 1 : -1]
        for number, event in enumerate(events):
            hue = self.colour(words.SEVERITIES.get(str(event.get("severity")), "foreground"))
            line = Text.assemble((f"{words.clock_time(event.get('at'))}Z  ", muted), (one_line(event.get("message")), hue))
            known.append(("events" if number == 0 else "", line))
        return known
