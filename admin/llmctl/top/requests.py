"""The fourth tab: the requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from llmctl.output import counted, duration, one_line
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.pane import Table
from llmctl.top.tables import MOST, Column


class Requests(Table):
    """See the module."""

    NAME = "request"
    NOTHING = "nothing runs, and nothing waits"
    HINT = "a aborts it"

    def columns(self) -> Sequence[Column]:
        return (
            Column("RID", self.key, 0),
            Column("CLIENT ID", lambda row: row.get("client_id"), 20, since="-wide"),
            Column("PHASE", lambda row: row.get("phase"), 9),
            Column("AGE", lambda row: row.get("age_s"), 7, True, lambda row: duration(row.get("age_s"))),
            Column("PROMPT", lambda row: row.get("prompt_tokens"), 7, True, since="-medium"),
            Column("TOKENS", lambda row: row.get("output_tokens"), 7, True),
            Column("TOK/S", lambda row: row.get("tokens_s"), 6, True, lambda row: f"{row.get('tokens_s') or 0:.1f}"),
            Column("SILENT", lambda row: row.get("silent_s"), 7, True, lambda row: words.short_time(row.get("silent_s")), since="-medium"),
            Column("PAGES", lambda row: row.get("pages"), 6, True, since="-medium"),
        )

    def key(self, row: dict[str, Any]) -> str:
        return str(row.get("rid"))

    def show(self, picture: Picture, feed: Feed) -> None:
        rows = picture.requests.get("requests") or []
        total = picture.requests.get("total", len(rows))
        more = f"; {MOST} shown, / finds others" if len(rows) > MOST else ""
        self.box.border_title = f"{counted(total, 'request')} in flight, oldest first{more}" if total else "requests in flight"
        self.draw(rows)

    def facts(self, row: dict[str, Any]) -> list[tuple[str, Text | str]]:
        first = row.get("first_token_s")
        got, most, prompt, known = (f"{row.get(name) or 0:,}" for name in ("output_tokens", "max_new_tokens", "prompt_tokens", "cached_tokens"))
        return [
            ("client id", one_line(row.get("client_id"))),
            ("tokens", f"{got} of {most} at most; prompt {prompt}, {known} of them known"),
            ("times", f"waited {duration(row.get('waited_s'))}, first token {f'after {duration(first)}' if first else 'not yet'}"),
        ]
