"""KV pages as glyphs: a bar, the same in numbers, and a map."""

from __future__ import annotations

import math
from typing import Any, Final

from rich.text import Text

from llmctl.top import words
from llmctl.top.style import Painted

#: How pages of each state are drawn.
PAGES: Final = (("active", "█", "primary"), ("cached", "▒", "secondary"), ("free", "·", "muted"))


def page_cells(kv: dict[str, Any], cells: int) -> list[int]:
    """How many of `cells` are active, cached and free; at least one for what is there."""
    total = kv.get("pages_total") or 0
    active = min(cells, _cells(kv.get("pages_active"), total, cells))
    cached = min(cells - active, _cells(kv.get("pages_cached"), total, cells))
    return [active, cached, cells - active - cached]


def _cells(pages: Any, total: int, cells: int) -> int:
    """How many of `cells` stand for them; at least one for what is there."""
    return max(1, round(cells * pages / total)) if total and pages else 0


def memory_bar(painted: Painted, kv: dict[str, Any], width: int) -> Text:
    """The pages as parts of a line, each state one run of glyphs."""
    parts = zip(PAGES, page_cells(kv, width), strict=True)
    return Text.assemble(*(_run(glyph, count, painted.colour(hue)) for (_, glyph, hue), count in parts))


def _run(glyph: str, count: int, hue: str) -> tuple[str, str]:
    """Full cells are ground, as in charts."""
    return (" " * count, f"on {hue}") if glyph == "█" else (glyph * count, hue)


def memory_text(painted: Painted, kv: dict[str, Any]) -> Text:
    """The same in numbers."""
    text = Text()
    for number, (name, glyph, hue) in enumerate(PAGES):
        text.append("  " * bool(number)).append(*_run(glyph, 1, painted.colour(hue))).append(" ")
        text.append(words.number(kv.get(f"pages_{name}")), "bold").append(f" {name}", painted.colour("muted"))
    return text


class PageMap(Painted):
    """KV pages as blocks, each for as many pages as there have to be; by state, not by place. Below them what the glyphs mean."""

    kv: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def show(self, kv: dict[str, Any]) -> None:
        self.kv = kv
        self.refresh()

    def render(self) -> Text:
        width, height = self.size
        rows = max(1, height - 1)
        total = self.kv.get("pages_total") or 0
        cells = min(width * rows, total)
        if not cells:
            return Text("no pages: the engine is not ready", self.colour("muted"))
        lines = memory_bar(self, self.kv, cells).divide(range(width, cells, width))
        text = Text("\n").join([*lines, *[Text()] * (rows - math.ceil(cells / width))])
        each = total / cells
        scale = "a block is a page" if each == 1 else f"a block is about {each:.{0 if each >= 10 else 1}f} pages"
        legend = memory_text(self, self.kv)
        if legend.cell_len + len(scale) + 3 <= width:
            legend.append(" " * (width - legend.cell_len - len(scale)) + scale, self.colour("muted"))
        return Text.assemble(text, "\n", legend, no_wrap=True)
