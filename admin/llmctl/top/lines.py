"""Lines that come and stay, the newest at the bottom: events and log. Only what is seen is drawn, and both lines and rows are bounded, whatever floods in."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.events import Resize
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from llmctl.top.style import Painted

#: Rows of the screen that are kept to scroll back through, and that one line may take.
KEPT: Final = 2000
_ROWS: Final = 6
#: Cells between two columns.
_GAP: Final = 2
_WORDS: Final = re.compile(r"\s*\S+")

#: (text, name of a colour, width); the last one wraps within what is left.
Cells = Sequence[tuple[str, str, int]]


class Lines(ScrollView, Painted, can_focus=True):
    """See the module. A line is any object; `day`, `plain` and `drawn` say how it is read."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._lines: tuple[Any, ...] = ()
        self._rows: deque[Strip] = deque(maxlen=KEPT)
        self._wanted = ""
        self._day = ""

    def show(self, lines: tuple[Any, ...]) -> None:
        """All of them; those that have been shown are the same objects as before."""
        last = self._lines[-1] if self._lines else None
        new = next((n + 1 for n in range(len(lines) - 1, -1, -1) if lines[n] is last), 0)
        self._lines = lines
        self._add(lines[new:])

    def filter(self, text: str) -> None:
        """Only lines that hold it, whatever the case."""
        self._wanted = text.casefold()
        self._again()

    def on_resize(self, event: Resize) -> None:
        self._again()

    def _again(self) -> None:
        self._rows.clear()
        self._day = ""
        self._add(self._lines)
        self.scroll_end(animate=False)

    def _add(self, lines: Sequence[Any]) -> None:
        width = self.scrollable_content_region.width
        if not width or not self.size.height:
            return
        end, before = self.is_vertical_scroll_end, len(self._rows)
        made = [row for line in lines if self._wanted in self.plain(line).casefold() for row in self._made(line, width)]
        self._rows.extend(made)
        self.virtual_size = Size(width, len(self._rows))
        if end:
            self.scroll_end(animate=False)
        elif gone := before + len(made) - len(self._rows):  # who has scrolled back reads, and is left there
            self.scroll_to(y=max(0, self.scroll_y - gone), animate=False, immediate=True)
        if made:
            self.refresh()

    def _made(self, line: Any, width: int) -> Iterator[Strip]:
        """The rows of one line; above the first line of a day, that day."""
        day = self.day(line) or self._day
        if day != self._day:
            self._day = day
            yield Strip([Segment(f"{day} UTC ", self._style("muted")), Segment("─" * width, self._style("line"))]).crop(0, width)
        *heads, (text, hue, _) = self.drawn(line)
        lead = sum(room + _GAP for _, _, room in heads)
        for number, part in enumerate(wrapped(text, max(1, width - lead))):
            first = [Segment(set_cell_size(head, room) + " " * _GAP, self._style(shade)) for head, shade, room in heads]
            yield Strip([*(first if number == 0 else [Segment(" " * lead)]), Segment(part, self._style(hue))]).crop(0, width)

    def _style(self, hue: str) -> Style:
        return Style.parse(self.colour(hue))

    def render_line(self, y: int) -> Strip:
        number, width = round(self.scroll_y) + y, self.scrollable_content_region.width
        row = self._rows[number] if number < len(self._rows) else Strip.blank(width)
        return row.extend_cell_length(width).apply_style(self.rich_style)

    def day(self, line: Any) -> str:
        """`2026-01-01`, in UTC; empty: that of the line before it."""
        raise NotImplementedError

    def plain(self, line: Any) -> str:
        """What the filter looks at."""
        raise NotImplementedError

    def drawn(self, line: Any) -> Cells:
        """How one line looks."""
        raise NotImplementedError


def wrapped(text: str, width: int) -> list[str]:
    """`text` in rows of up to `width` cells, broken between words where that can be; what takes more than _ROWS rows ends in an ellipsis."""
    rows, row = [], ""
    # No more is looked at than can be seen: a line may be as long as a file.
    for word in _WORDS.findall(text[: width * _ROWS + 1]):
        if cell_len(row) + cell_len(word) <= width:
            row += word
            continue
        if row:
            rows.append(row)
        *whole, row = chop_cells(word.strip(), width) or [""]
        rows += whole
    rows.append(row)
    if len(rows) > _ROWS or len(text) > width * _ROWS + 1:
        rows = rows[:_ROWS]
        rows[-1] = set_cell_size(rows[-1], min(cell_len(rows[-1]), width - 1)) + "…"
    return rows
