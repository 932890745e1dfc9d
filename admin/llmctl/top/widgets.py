"""The small parts that the panes are made of. Each has `show`, which takes plain data; none asks anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.color import Color
from textual.containers import Vertical
from textual.events import Resize
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import DataTable, RichLog, Static

from llmctl.output import one_line
from llmctl.top.style import STATES

_BARS: Final = " ▁▂▃▄▅▆▇█"
#: Rows that are drawn; drawing all of thousands each second would cost more than it tells.
MOST: Final = 200
#: Cells between two columns.
_GAP: Final = 1


class Painted(Widget):
    """A widget that draws with the theme's colours."""

    def colour(self, name: str) -> str:
        """As rich writes it: a colour of the theme, or one of its variables."""
        return self.app.theme_variables.get(name, "default")

    def state_text(self, state: str) -> Text:
        """A state in its colour."""
        return Text(state, self.colour(STATES.get(state, "foreground")))


class Chart(Painted):
    """Bars, as many as it is wide and as high as it is; scaled to the highest, or to `top`."""

    values: Callable[[int], list[float | None]] | None = None
    top: float | None = None

    def __init__(self, hue: str) -> None:
        super().__init__()
        self._hue = hue

    def render(self) -> Text:
        width, height = self.size
        values = self.values(width) if self.values is not None and width else []
        peak = self.top or max((value for value in values if value is not None), default=0.0) or 1.0
        hue, ground = Color.parse(self.colour(self._hue)), Color.parse(self.colour("background"))
        text = Text(no_wrap=True, overflow="crop")
        for row in range(height - 1, -1, -1):
            # Fainter towards the ground, so that a wall of bars stays calm.
            shade = ground.blend(hue, 1.0 if height == 1 else 0.6 + 0.4 * row / (height - 1)).hex
            text.append("".join(_cell(value, peak, row, height) for value in values) + "\n" * (row > 0), shade)
        return text


def _cell(value: float | None, peak: float, row: int, height: int) -> str:
    if value is None:
        return " "
    eighths = max(1, round(min(1.0, value / peak) * height * 8))  # even nothing has a ground line: it was seen, and it was nothing
    return _BARS[max(0, min(8, eighths - row * 8))]


class Headline(Painted):
    """One line: what matters, and on the right what goes with it. Names itself where its tile has no border to do it."""

    content: reactive[tuple[Text, Text]] = reactive((Text(), Text()))

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def render(self) -> Text:
        left, right = self.content
        if self.screen.has_class("-short"):
            left = Text.assemble((f"{self._title}  ", self.colour("muted")), left)
        gap = self.size.width - left.cell_len - right.cell_len
        line = Text.assemble(left, " " * gap, right) if gap > 0 else left.copy()
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


class Tile(Vertical):
    """A headline above a chart."""

    def __init__(self, title: str, hue: str, id: str) -> None:
        super().__init__(id=id)
        self.border_title = title
        self.headline = Headline(title)
        self.chart = Chart(hue)

    def compose(self) -> ComposeResult:
        yield self.headline
        yield self.chart

    def show(self, left: Text, right: Text, values: Callable[[int], list[float | None]], top: float | None = None) -> None:
        """`values(width)` are the chart's columns."""
        self.headline.content = (left, right)
        self.chart.values, self.chart.top = values, top
        self.chart.refresh()


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    value: Callable[[dict[str, Any]], Any]
    """By which it is sorted; shown as it is, if nothing else is said."""
    width: int
    """0: what is left."""
    right: bool = False
    shown: Callable[[dict[str, Any]], str] | None = None
    since: Literal["", "-medium", "-wide"] = ""
    """Only where the screen is at least so wide."""

    def text(self, row: dict[str, Any]) -> str:
        return one_line(self.shown(row) if self.shown is not None else self.value(row))


class Rows(DataTable[Text], Painted):
    """A table that can be filtered and sorted, and keeps its cursor on its row while the rows change."""

    def __init__(self, columns: Sequence[Column], key: Callable[[dict[str, Any]], str], sort: int | None = None, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0, zebra_stripes=False)
        self._all, self._key, self._sort = tuple(columns), key, sort
        self._columns: tuple[Column, ...] = ()
        self._rows: list[dict[str, Any]] = []
        self._drawn: list[dict[str, Any]] = []
        self._widths: list[int] = []
        self._leads: list[int] = []
        self._filter = ""

    def show(self, rows: Iterable[dict[str, Any]]) -> None:
        """These are the rows now."""
        self._rows = list(rows)
        self._draw()

    def filter(self, text: str) -> None:
        """Only rows that hold it, whatever the case."""
        self._filter = text.casefold()
        self._draw()

    def sort_next(self) -> str:
        """By the next column; its name."""
        number = len(self._columns)
        self._sort = 0 if self._sort is None else (self._sort + 1) % max(1, number)
        self._draw()
        return self._columns[self._sort].name if number else ""

    @property
    def marked(self) -> dict[str, Any] | None:
        """The row under the cursor."""
        return self._drawn[self.cursor_row] if 0 <= self.cursor_row < len(self._drawn) else None

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if not self.size.width:
            return
        marked, scrolled = self.marked, self.scroll_y
        self.clear(columns=True)
        self._columns = tuple(column for column in self._all if self._has_room(column))
        self._heads()
        self._drawn = self._sorted([row for row in self._rows if self._wanted(row)])[:MOST]
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

    def _wanted(self, row: dict[str, Any]) -> bool:
        return not self._filter or any(self._filter in column.text(row).casefold() for column in self._all)

    def _sorted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._sort is None or self._sort >= len(self._columns):
            return rows
        column = self._columns[self._sort]
        known = [row for row in rows if column.value(row) is not None]
        return sorted(known, key=column.value, reverse=column.right) + [row for row in rows if column.value(row) is None]

    def _cell(self, number: int, row: dict[str, Any]) -> Text:
        column = self._columns[number]
        text = column.text(row)
        cell = self.state_text(text) if column.name == "STATE" else Text(text, self.colour("muted") if text in ("-", "–", "0") else "")
        return self._fitted(number, cell)

    def _fitted(self, number: int, text: Text) -> Text:
        """As wide as its column, with the cells that part it from its neighbours."""
        lead, right = self._leads[number], self._columns[number].right
        width = self._widths[number] - lead * (self._columns[number].width == 0)
        text.truncate(width, overflow="ellipsis")
        text.pad_left(lead + (width - text.cell_len if right else 0))
        text.pad_right(width + lead + _GAP - text.cell_len)
        text.no_wrap = True
        return text


class Lines(RichLog, Painted):
    """Lines that come and stay, the newest at the bottom; can be filtered."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, wrap=True, max_lines=2000, min_width=1)
        self._kept: tuple[Any, ...] = ()
        self._filter = ""

    def show(self, lines: tuple[Any, ...]) -> None:
        """All of them; those that have been shown are the same objects as before."""
        last = self._kept[-1] if self._kept else None
        new = next((n + 1 for n in range(len(lines) - 1, -1, -1) if lines[n] is last), 0)
        self._kept = lines
        end = self.is_vertical_scroll_end  # who has scrolled back reads, and is left there
        for line in lines[new:]:
            self._add(line, end)

    def filter(self, text: str) -> None:
        """Only lines that hold it, whatever the case."""
        self._filter = text.casefold()
        self._again()

    def on_resize(self, event: Resize) -> None:
        self._again()

    def _again(self) -> None:
        self.clear()
        for line in self._kept:
            self._add(line, True)

    def _add(self, line: Any, end: bool) -> None:
        if self._filter in self.plain(line).casefold():
            self.write(self.drawn(line), expand=True, scroll_end=end)

    def plain(self, line: Any) -> str:
        """What the filter looks at."""
        raise NotImplementedError

    def drawn(self, line: Any) -> RenderableType:
        """How one line looks."""
        raise NotImplementedError

    def columns(self, *cells: tuple[str, str, int]) -> Table:
        """(text, colour, width) side by side; 0 is what is left, and wraps within it."""
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _, _, width in cells:
            grid.add_column(width=width or None, ratio=None if width else 1)
        grid.add_row(*(Text(text, self.colour(hue)) for text, hue, _ in cells))
        return grid


class Detail(Static):
    """All that is known of the marked row."""
