"""How the dashboard looks: the colours, and the sheet. Without colour (NO_COLOR) what matters is still said by words, glyphs, bold and reverse."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import Theme
from textual.widget import Widget

from llmctl.top.words import STATES

THEME: Final = Theme(
    name="llmd",
    primary="#7aa6da",
    secondary="#8fb8b0",
    accent="#c3a6d8",
    foreground="#c9ced6",
    background="#15181d",
    surface="#1a1e24",
    panel="#242a32",
    success="#83b88c",
    warning="#d8b36a",
    error="#dc7f83",
    dark=True,
    variables={"muted": "#77808c", "line": "#343c46", "footer-key-foreground": "#7aa6da"},
)

SHEET: Final = """
* { scrollbar-color: $line; scrollbar-color-hover: $muted; scrollbar-color-active: $primary; scrollbar-background: $background;
    scrollbar-background-hover: $background; scrollbar-background-active: $background; scrollbar-corner-color: $background; }
Screen { background: $background; color: $foreground; }
#head, #tabs, #foot { height: 1; padding: 0 1; background: $panel; }
#filter { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
#panes { height: 1fr; padding: 0; }
Pane { height: 1fr; }
.-stale Tile, .-stale EventLines, .-stale Rows, .-stale PageMap, .-stale Detail { opacity: 45%; }
.-tiny #head, .-tiny #tabs, .-tiny #foot, .-tiny #panes { display: none; }

#banner { height: auto; min-height: 3; max-height: 5; padding: 0 1; border-left: outer $muted; background: $surface; }
#banner.-success { border-left: outer $success; }
#banner.-warning { border-left: outer $warning; }
#banner.-error { border-left: outer $error; }
.-tiny #banner { min-height: 1; max-height: 100%; padding: 0; border: none; }

#tiles { layout: grid; grid-size: 2; grid-columns: 1fr; grid-rows: 1fr; height: 1fr; }
Tile, .box { border: round $line; border-title-color: $muted; border-subtitle-color: $muted; padding: 0 1; }
Tile > Chart { height: 1fr; }
Tile > Headline { height: 1; }
#memory { height: 3; }
.-tall #memory { height: 6; }
#memory > Chart { display: none; }
.-tall #memory > Chart { display: block; }
.-short Tile { border: none; }
.-short #memory { height: 1; }

Rows { height: 1fr; background: $background; scrollbar-size: 0 1; scrollbar-gutter: stable; overflow-x: hidden; }
Rows:focus, Lines:focus { background-tint: $background 0%; }
Rows > .datatable--header { background: $background; color: $muted; text-style: none; }
Rows > .datatable--cursor { background: $panel; color: $foreground; text-style: none; }
Rows:focus > .datatable--cursor { background: $primary 30%; color: $foreground; text-style: bold; }
Rows > .datatable--hover, Rows > .datatable--header-hover { background: $surface; }
.box { height: 1fr; }
.box:focus-within { border: round $primary 60%; border-title-color: $foreground; }
.nothing { height: 1fr; color: $muted; content-align: center middle; }
Detail { height: auto; max-height: 6; border: round $line; border-title-color: $muted; border-subtitle-color: $muted; padding: 0 1; color: $foreground; }
Detail, .-short #banner { text-wrap: nowrap; text-overflow: ellipsis; }
Processes > .box { height: auto; max-height: 60%; }
Processes Rows { height: auto; }
Processes > Detail { height: 1fr; min-height: 4; max-height: 100%; }
#map { height: 7; }
.-tall #map { height: 11; }
.-short #map { height: 5; }
PageMap { height: 1fr; }
#cache-tables { height: 1fr; layout: vertical; }
.-wide #cache-tables { layout: horizontal; }
.-short #holders { display: none; }
Lines { height: 1fr; background: $background; scrollbar-size-vertical: 1; scrollbar-gutter: stable; overflow-x: hidden; }

Ask, Keys, About, Choose { align: center middle; background: $background 60%; }
.dialog { width: 72; max-width: 94%; height: auto; max-height: 90%; border: round $primary; background: $surface; padding: 1 2; }
.dialog { border-title-color: $foreground; }
.dialog.-ends { border: round $error; }
.dialog .line { margin: 1 0 0 0; color: $primary; }
.dialog #plan { height: auto; max-height: 42vh; scrollbar-size-vertical: 1; }
Keys .dialog #plan { max-height: 66vh; }
.dialog #text { height: auto; }
.dialog .buttons { height: 1; margin: 1 0 0 0; color: $muted; }
.dialog .field { height: 1; margin: 1 0 0 0; }
.dialog .field Static { width: 9; color: $muted; }
.dialog .field Input { width: 1fr; height: 1; border: none; padding: 0 1; background: $panel; }
.dialog #mode { margin: 1 0 0 0; }
.-short .dialog { padding: 0 1; max-height: 100%; }
.-short .dialog #plan { max-height: 30vh; }
.-tiny .dialog { padding: 0; max-width: 100%; max-height: 100%; border: none; }
.-tiny .dialog .line, .-tiny .dialog .buttons, .-tiny .dialog .field, .-tiny .dialog #mode { margin: 0; }
CommandPalette > Vertical { width: 72; max-width: 94%; margin-top: 2; background: $surface; }
CommandPalette SearchIcon { display: none; }
CommandPalette #--input { border: round $line; background: $surface; }
CommandPalette CommandInput { padding: 0 1; background: $surface; }
CommandPalette CommandList, CommandPalette CommandList:focus { background: $surface; border: none; }
ToastRack { margin-bottom: 1; }
"""


class Painted(Widget):
    """A widget that draws with the theme's colours."""

    def colour(self, name: str) -> str:
        """As rich writes it: a colour of the theme, or one of its variables."""
        return self.app.theme_variables.get(name, "default")

    def state_text(self, state: str) -> Text:
        """A state in its colour."""
        return Text(state, self.colour(STATES.get(state, "foreground")))


class NoColours(LineFilter):
    """Takes all colours away; what stood on a ground that stands out is reversed, and what was faint stays faint."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, _plain(style, background.rgb) if style is not None else None, control) for text, style, control in segments]


#: Brightness (0 to 1) by which a ground stands out, and below which text is faint.
_STANDS_OUT: Final = 0.12
_FAINT: Final = 0.54


@lru_cache(1024)
def _plain(style: Style, background: tuple[int, int, int]) -> Style:
    ground = Color.from_rich_color(style.bgcolor).brightness if style.bgcolor is not None else Color(*background).brightness
    text = Color.from_rich_color(style.color).brightness if style.color is not None else 1.0
    stands_out = ground - Color(*background).brightness > _STANDS_OUT
    return Style(bold=style.bold, italic=style.italic, underline=style.underline, reverse=bool(style.reverse) or stands_out or None, dim=text < _FAINT or None)
