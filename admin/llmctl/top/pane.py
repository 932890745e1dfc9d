"""What the tabs have in common. Each takes a Picture and the Feed that keeps the history, and draws what concerns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from llmctl.output import one_line
from llmctl.top.feed import Feed, Picture
from llmctl.top.lines import Lines
from llmctl.top.style import Painted
from llmctl.top.tables import Box, Column, Rows

#: Rows of a tab from which on there is room for the detail too.
_ROOMY: Final = 11


class Pane(Vertical, Painted):
    """One tab."""

    def show(self, picture: Picture, feed: Feed) -> None:
        """Draw it."""
        raise NotImplementedError

    @property
    def parts(self) -> list[Rows | Lines]:
        """What can have the focus, in this order."""
        return [*self.query(Rows), *self.query(Lines)]

    def filter(self, text: str) -> None:
        """Only rows and lines that hold it."""
        for part in (*self.query(Box), *self.query(Lines)):
            part.filter(text)


class Detail(Static):
    """All that is known of the marked row."""


class Table(Pane):
    """One table, and below it all that is known of its marked row."""

    NAME: ClassVar[str]
    TITLE: ClassVar[str] = ""
    NOTHING: ClassVar[str] = "nothing"
    HINT: ClassVar[str] = ""
    """What can be done with the marked row."""

    def columns(self) -> Sequence[Column]:
        """Of the table."""
        raise NotImplementedError

    def key(self, row: dict[str, Any]) -> str:
        """What the row is, as long as it is there; the head of the detail."""
        raise NotImplementedError

    def facts(self, row: dict[str, Any]) -> list[tuple[str, Text | str]]:
        """(name, value) of what is known of it; a name may be empty."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        yield Box(self.TITLE, Rows(self.columns(), self.key, id=f"{self.NAME}-rows"), self.NOTHING)
        yield Detail()

    @property
    def box(self) -> Box:
        return self.query_one(Box)

    def draw(self, rows: list[dict[str, Any]]) -> None:
        """The table and the detail."""
        self.box.show(rows)
        self.detail()

    def filter(self, text: str) -> None:
        super().filter(text)
        self.detail()

    def on_data_table_row_highlighted(self) -> None:
        self.detail()

    def detail(self) -> None:
        """What is known of the marked row; nothing where none is."""
        row, detail = self.box.rows.marked, self.query_one(Detail)
        detail.display = row is not None and self.size.height >= _ROOMY
        if row is None:
            return
        detail.border_title = Content(one_line(self.key(row)))  # it may be a client's, and is no markup
        detail.border_subtitle = self.HINT
        facts = self.facts(row)
        width = max(len(name) for name, _ in facts)
        detail.update(Text("\n").join(Text.assemble((f"{name:<{width}}  ", self.colour("muted")), value) for name, value in facts))
