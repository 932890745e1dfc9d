"""Compares what the dashboard draws with pictures that were looked at. Only what is seen counts: where each run of text stands, its style, its ground.

`DRAW_TOP=1 pytest tests/unit/llmctl/test_top_pictures.py` draws them anew: look at them before they are committed.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Final

_RULE = re.compile(r"\.[\w-]+-(r\d+) \{([^}]*)\}")
_TEXT = re.compile(r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
_GROUND = re.compile(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
#: Cells of rich's pictures, in their units.
_WIDTH: Final = 12.2
_HEIGHT: Final = 24.4

Run = tuple[int, int, str, str]


def runs(svg: str) -> list[Run]:
    """(row, column, text, style) of each run, and (row, column, width, ground) of what lies under it."""
    styles = {name: rule.strip() for name, rule in _RULE.findall(svg)}
    found = [
        (round(float(y) / _HEIGHT), round(float(x) / _WIDTH), html.unescape(text).replace("\xa0", " "), styles[name]) for name, x, y, text in _TEXT.findall(svg)
    ]
    grounds = [(round(float(y) / _HEIGHT), round(float(x) / _WIDTH), f"{float(width) / _WIDTH:.0f} cells", fill) for fill, x, y, width in _GROUND.findall(svg)]
    return [run for run in sorted(found) if run[2].strip()] + sorted(grounds)


def lines(svg: str) -> list[str]:
    """The picture as plain text."""
    rows: dict[int, str] = {}
    for row, column, text, _ in runs(svg):
        if not text.endswith(" cells"):
            rows[row] = rows.get(row, "").ljust(column) + text
    return [rows.get(row, "") for row in range(max(rows, default=0) + 1)]


def differs(drawn: str, path: Path, directory: Path) -> str:
    """Empty if `drawn` shows what the picture at `path` shows; else what is different, and `drawn` is left in `directory`."""
    expected = path.read_text()
    if runs(drawn) == runs(expected):
        return ""
    left = directory / path.name
    left.write_text(drawn)
    rows = [f"- {before}\n+ {after}" for before, after in zip(lines(expected), lines(drawn), strict=False) if before != after]
    return f"{path.name} is drawn otherwise (see {left}):\n" + ("\n".join(rows) or "the same text in other colours")
