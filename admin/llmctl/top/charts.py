"""Numbers over time: a headline with a chart below it, in a tile. What is drawn comes as plain data; nobody is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from rich.text import Text
from textual.app import ComposeResult
from textual.color import Color
from textual.containers import Vertical
from textual.reactive import reactive

from llmctl.top.style import Painted

#: Eighths of a cell, from below.
_BARS: Final = " ▁▂▃▄▅▆▇"
#: How much of the colour is left in the lowest row, so that a wall of bars stays calm.
_FAINTEST: Final = 0.55


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
        levels = eighths(values, self.top, height)
        hue, ground = Color.parse(self.colour(self._hue)), Color.parse(self.colour("background"))
        text = Text(no_wrap=True, overflow="crop")
        for row in range(height - 1, -1, -1):
            shade = ground.blend(hue, _FAINTEST + (1 - _FAINTEST) * (row + 1) / height).hex
            # A full cell is a ground of this colour: the block's glyph leaves lines between rows in many fonts.
            for full, cells in groupby((max(0, min(8, level - row * 8)) for level in levels), key=lambda cell: cell == 8):
                text.append("".join(" " if full else _BARS[cell] for cell in cells), f"on {shade}" if full else shade)
            text.append("\n" * (row > 0))
        return text


def eighths(values: Sequence[float | None], top: float | None, height: int) -> list[int]:
    """How high each bar is, in eighths of a row. What is known to be nothing has a ground line; what is not known has none."""
    peak = top or max((value for value in values if value is not None), default=0.0) or 1.0
    return [0 if value is None else max(1, round(min(1.0, value / peak) * height * 8)) for value in values]


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
