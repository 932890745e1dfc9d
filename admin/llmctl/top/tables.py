"""Tables whose rows change all the time: columns that fit the room, a filter, an order, and a mark that stays on its row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Resize
from textual.widgets import DataTable, Static

from llmctl.output import one_line
from llmctl.top.style import Painted

#: Rows that are drawn; drawing all of thousands each second would cost more than it tells.
MOST: Final = 200
#: Cells between two columns.
_GAP: Final = 1
#: Cells below which the end of a long text tells more than its beginning.
_SHORT: Final = 8
_NOTHING: Final = ("-", "–", "0", "0.0")


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    value: Callable[[dict[str, Any]], Any]
    """By which it is sorted; shown as it is, numbers with commas, if nothing else is said."""
    width: int
    """0: what is left."""
    right: bool = False
    shown: Callable[[dict[str, Any]], str] | None = None
    since: Literal["", "-medium", "-wide"] = ""
    """Only where the screen is at least so wide."""

    def text(self, row: dict[str, Any]) -> str:
        value = self.shown(row) if self.shown is not None else self.value(row)
        return one_line(f"{value:,}" if isinstance(value, int) else value)


class Rows(DataTable[Text], Painted):
    """A table that can be filtered and sorted, and keeps its cursor on its row while the rows change."""

    def __init__(self, columns: Sequence[Column], key: Callable[[dict[str, Any]], str], id: str) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0, zebra_stripes=False)
        self._all, self._key = tuple(columns), key
        self._sort: int | None = None
        self._columns: tuple[Column, ...] = ()
        self._rows: list[dict[str, Any]] = []
        self._drawn: list[dict[str, Any]] = []
        self._widths: list[int] = []
        self._leads: list[int] = []
        self.wanted = ""
        """What the filter asks for, in lower case."""

    def show(self, rows: Iterable[dict[str, Any]]) -> None:
        """These are the rows now."""
        self._rows = list(rows)
        self._draw()

    def filter(self, text: str) -> None:
        """Only rows that hold it, whatever the case."""
        self.wanted = text.casefold()
        self._draw()

    def sort_next(self) -> None:
        """By the next column."""
        self._sort = 0 if self._sort is None else (self._sort + 1) % max(1, len(self._columns))
        self._draw()

    @property
    def marked(self) -> dict[str, Any] | None:
        """The row under the cursor."""
        return self._drawn[self.cursor_row] if 0 <= self.cursor_row < len(self._drawn) else None

    @property
    def drawn(self) -> int:
        """How many rows are seen, or would be on a longer screen."""
        return len(self._drawn)

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if not self.size.width:
            return
        marked, scrolled = self.marked, self.scroll_y
        self.clear(columns=True)
        self._columns = tuple(column for column in self._all if self._has_room(column))
        self._heads()
        self._drawn = self._sorted([row for row in self._rows if self._is_wanted(row)])[:MOST]
        for row in self._drawn:
            self.add_row(*(self._cell(number, row) for number in range(len(self._columns))))
        if marked is not None:
            place = next((n for n, row in enumerate(self._drawn) if self._key(row) == self._key(marked)), 0)
            self.move_cursor(row=place, animate=False, scroll=False)
        self.scroll_to(y=scrolled, animate=False)

    def _has_room(self, column: Column) -> bool:
        return self.screen.has_class("-wide") or column.since == "" or (column.since == "-medium" and not self.screen.has_class("-narrow"))

    def _heads(self) -> None:
        room = self.scrollable_content_region.width
        left = room - sum(column.width + _GAP for column in self._columns if column.width) - _GAP
        self._widths = [column.width or max(4, left) for column in self._columns]
        rights = [False, *(column.right for column in self._columns)]
        # Words right after numbers keep one cell more away from them.
        self._leads = [int(before and not column.right) for before, column in zip(rights, self._columns, strict=False)]
        for number, column in enumerate(self._columns):
            mark = ("▾" if column.right else "▴") if number == self._sort else ""
            label = self._fitted(number, Text(column.name + mark))
            self.add_column(label, width=label.cell_len, key=column.name)

    def _is_wanted(self, row: dict[str, Any]) -> bool:
        return not self.wanted or any(self.wanted in column.text(row).casefold() for column in self._all)

    def _sorted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._sort is None or self._sort >= len(self._columns):
            return rows
        column = self._columns[self._sort]
        known = [row for row in rows if column.value(row) is not None]
        return sorted(known, key=column.value, reverse=column.right) + [row for row in rows if column.value(row) is None]

    def _cell(self, number: int, row: dict[str, Any]) -> Text:
        column = self._columns[number]
        text = column.text(row)
        cell = self.state_text(text) if column.name == "STATE" else Text(text, self.colour("muted") if text in _NOTHING else "")
        return self._fitted(number, cell)

    def _fitted(self, number: int, text: Text) -> Text:
        """As wide as its column, with the cells that part it from its neighbours."""
        lead, right = self._leads[number], self._columns[number].right
        width = self._widths[number] - lead * (self._columns[number].width == 0)
        if text.cell_len > width < _SHORT:  # names that begin alike
            text = text[-max(1, width - 1) :]
            text = Text.assemble("…", text)
        text.truncate(width, overflow="ellipsis")
        text.pad_left(lead + (width - text.cell_len if right else 0))
        text.pad_right(width + lead + _GAP - text.cell_len)
        text.no_wrap = True
        return text


class Box(Vertical):
    """A table in a frame; where it has no rows, a word in place of them."""

    def __init__(self, title: str, rows: Rows, nothing: str, id: str | None = None) -> None:
        super().__init__(id=id, classes="box")
        self.border_title = title
        self.rows = rows
        self._nothing = Static(nothing, classes="nothing", markup=False)
        self._said = nothing

    def compose(self) -> ComposeResult:
        yield self.rows
        yield self._nothing

    def show(self, rows: Iterable[dict[str, Any]]) -> None:
        """These are the rows now."""
        self.rows.show(rows)
        self._look()

    def filter(self, text: str) -> None:
        """Only rows that hold it."""
        self.rows.filter(text)
        self._look()

    def _look(self) -> None:
        self._nothing.display = not self.rows.drawn
        self._nothing.update(f"no row holds “{one_line(self.rows.wanted)}”" if self.rows.wanted else self._said)
