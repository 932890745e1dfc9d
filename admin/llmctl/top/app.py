"""The dashboard itself: what is where, which key does what, when the daemon is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input, Static

from llmctl.output import duration
from llmctl.top import style, words
from llmctl.top.actions import ACTIONS, Action, abort
from llmctl.top.away import away
from llmctl.top.cache import Cache
from llmctl.top.dialogs import About, Ask, Keys
from llmctl.top.events import Events
from llmctl.top.feed import Feed, Picture
from llmctl.top.keys import CHANGING, LOOKING, TABS, Key
from llmctl.top.overview import Banner, Overview
from llmctl.top.palette import Verbs
from llmctl.top.pane import Pane
from llmctl.top.processes import Processes
from llmctl.top.requests import Requests
from llmctl.top.tables import Rows
from llmctl.top.weights import Choose

#: Seconds between two questions, and between two looks at how old the answer is.
EVERY: Final = 1.0
_TICK: Final = 0.5
#: Cells below which words are left out.
_NARROW: Final = 70
#: Cells below which tabs have no room for their names.
_NAMED: Final = 58


#: What stands in the footer for all the tabs' keys.
TAB_KEYS: Final = Key("", "", "tabs", "1-5", "tabs")


class Bar(Static):
    """A line whose words can be clicked, and look like any others."""

    auto_links = False


def foot(width: int, tab: int, *, draining: bool) -> list[Key]:
    """The keys that the last line shows: on a wide screen those too that change something, if they would now; on a narrow one the most needed."""
    useless = {"a" if tab != 4 else "", "d" if draining else "e"}
    looking = [key for key in LOOKING if key.footer]
    changing = [key for key in CHANGING if key.label not in useless]
    shown = [TAB_KEYS, *looking[:-3], *changing, *looking[-3:]]
    if _length(shown) > width:  # some of these would look like all of them
        shown = [key for key in shown if key not in changing or key.label == "a"]
    for key in (TAB_KEYS, looking[-2], looking[1], looking[0]):
        if _length(shown) > width:
            shown.remove(key)
    return shown


def _length(keys: list[Key]) -> int:
    """Cells that they take, side by side."""
    return sum(len(f"{key.label} {key.footer}  ") for key in keys) - 2


class Top(App[None]):
    """See the module. `every=None`: never asks by itself, for tests that say when."""

    CSS = style.SHEET
    TITLE = "llmctl top"
    AUTO_FOCUS = None
    COMMANDS = {Verbs}  # noqa: RUF012 - as textual wants it
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-medium"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (8, "-short"), (24, "-usual"), (34, "-tall")]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        # `/` is taken before the focused table gets it: else the table would get what is typed right after it too.
        *(Binding(key.key, key.action, key.what, show=False, priority=key.key == "slash") for key in (*LOOKING, *CHANGING) if key.key != "ctrl+p"),
        Binding("escape", "unfilter", "end the filter", show=False),
    ]

    def __init__(self, feed: Feed, *, colour: bool = True, every: float | None = EVERY) -> None:
        super().__init__()
        self.register_theme(style.THEME)
        self.theme = style.THEME.name
        self.feed = feed
        self.picture: Picture = feed.picture
        self._every = every
        self._tab = 1
        self._now = asyncio.Event()
        if not colour or self.no_color:
            self._filters = [style.NoColours()]

    # ------------------------------------------------------------ what is where

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Bar(id="tabs")
        yield Banner(id="banner")
        with ContentSwitcher(id="panes", initial="tab-1"):
            for number, pane in enumerate((Overview, Processes, Cache, Requests, Events), 1):
                yield pane(id=f"tab-{number}")
        yield Input(placeholder="only lines that hold …", id="filter", disabled=True)
        yield Bar(id="foot")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The sheet is read before the theme is there."""
        return style.THEME.variables

    def on_mount(self) -> None:
        self.set_interval(_TICK, self._head)
        self.call_after_refresh(self._draw)
        if self._every is not None:
            self.run_worker(self._watch(self._every), group="watch")

    @property
    def pane(self) -> Pane:
        """The tab that is seen."""
        return self.screen_stack[0].query_one(f"#tab-{self._tab}", Pane)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """None of textual's own: the palette has llmctl's verbs."""
        return ()

    # ------------------------------------------------------------ asking

    async def _watch(self, every: float) -> None:
        """Ask for ever; a slow daemon makes it ask less often, and never holds anything up."""
        while True:
            tab = self._tab
            self.take(await away(lambda tab=tab: self.feed.poll(tab)))  # type: ignore[misc]
            try:
                await asyncio.wait_for(self._now.wait(), every)
            except TimeoutError:
                pass
            self._now.clear()

    def take(self, picture: Picture) -> None:
        """A new picture."""
        self.picture = picture
        self._draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        if self.is_running and self.screen_stack and self.screen_stack[0].query(Pane):
            with self.batch_update():
                self._head()
                self._foot()
                banner = self.screen_stack[0].query_one(Banner)
                # The other tabs need the room, unless something is to be said.
                banner.display = self._tab == 1 or words.hue(self.picture) != "success" or self.screen_stack[0].has_class("-tiny")
                banner.show(self.picture)
                self.pane.show(self.picture, self.feed)

    def _head(self) -> None:
        """Whom this watches, and how old that is."""
        if not self.screen_stack or not self.screen_stack[0].query("#head"):
            return  # it is ending
        at = self.picture.at
        age = None if at is None else self.feed.clock() - at
        stale = self.picture.error is not None or (age is not None and age > words.STALE)
        base = self.screen_stack[0]
        banner = base.query_one(Banner)
        base.set_class(stale, "-stale")
        colours = self.theme_variables
        said = "no answer yet" if age is None else f"{duration(age)} old" if stale else "live" if banner.display else words.state(self.picture)
        mark = Text(f"  {'○' if stale or age is None else '●'} {said}", colours["warning" if stale else "muted" if age is None else "success"])
        left = Text.assemble(("llmd ", f"bold {colours['primary']}"), (words.identity(self.picture.status), colours["muted"]))
        width = max(0, self.size.width - 2)
        left.truncate(max(0, width - mark.cell_len), overflow="ellipsis", pad=True)
        base.query_one("#head", Static).update(Text.assemble(left, mark))
        self._tab_line()

    def _tab_line(self) -> None:
        colours = self.theme_variables
        narrow = self.size.width < _NARROW
        line = Text(no_wrap=True)
        for number, name in enumerate(TABS, 1):
            here = number == self._tab
            style = Style.parse(f"bold reverse {colours['primary']}" if here else colours["foreground"])
            named = here or self.size.width >= _NAMED
            line.append(f" {number} {name} " if named else f" {number} ", style + Style(meta={"@click": f"app.tab({number})"}))
            line.append("" if narrow else "  ")
        self.screen_stack[0].query_one("#tabs", Static).update(line)

    def _foot(self) -> None:
        colours = self.theme_variables
        shown = foot(self.size.width - 2, self._tab, draining=words.state(self.picture) == "draining")
        gap = "   " if sum(len(f"{key.label} {key.footer}   ") for key in shown) - 3 <= self.size.width - 2 else "  "
        line = Text(no_wrap=True)
        for key in shown:
            click = Style(meta={"@click": f"app.{key.action}"} if key is not TAB_KEYS else {})
            line.append(gap if line else "").append(key.label, Style.parse(f"bold {colours['primary']}") + click)
            line.append(f" {key.footer}", Style.parse(colours["muted"]) + click)
        self.screen_stack[0].query_one("#foot", Static).update(line)

    # ------------------------------------------------------------ keys

    def action_tab(self, number: int) -> None:
        """Go to a tab."""
        self._tab = number
        self.screen_stack[0].query_one("#panes", ContentSwitcher).current = f"tab-{number}"
        self.call_after_refresh(self._arrive)

    def _arrive(self) -> None:
        parts = self.pane.parts
        if parts and not isinstance(self.focused, Input):
            parts[0].focus()
        self._apply_filter()
        self._draw()
        self._now.set()  # what this tab shows is asked for at once

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Where text is typed, and in dialogs, `/` is a character like others."""
        return action != "filter" or (not isinstance(self.focused, Input) and len(self.screen_stack) == 1)

    def action_filter(self) -> None:
        """Ask for the text."""
        box = self.screen_stack[0].query_one("#filter", Input)
        box.display, box.disabled = True, False
        self.screen_stack[0].set_focus(box)  # at once: what is typed next belongs to it

    def action_unfilter(self) -> None:
        """All lines again."""
        box = self.screen_stack[0].query_one("#filter", Input)
        box.value = ""
        box.display, box.disabled = False, True
        self._arrive()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._apply_filter()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            event.input.display, event.input.disabled = bool(event.value), True
            self._arrive()

    def _apply_filter(self) -> None:
        self.pane.filter(self.screen_stack[0].query_one("#filter", Input).value)

    def action_sort(self) -> None:
        """Sort the table that has the focus, or the first."""
        tables = list(self.pane.query(Rows))
        chosen = next((table for table in tables if table.has_focus), tables[0] if tables else None)
        if chosen is not None:
            chosen.sort_next()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Keys())

    def action_change(self, name: str) -> None:
        """Show the plan of a change, and ask."""
        if name == "weights":
            self.push_screen(Choose(self.feed.asks), lambda action: self.ask(action) if action is not None else None)
            return
        if name != "abort":
            self.ask(ACTIONS[name])
            return
        marked = self.screen_stack[0].query_one("#request-rows", Rows).marked if self._tab == 4 else None
        if marked is None:
            self.notify("mark a request on tab 4 first; the palette (^p) has `abort all`", title="abort")
        else:
            self.ask(abort(str(marked.get("request") or marked.get("rid"))))

    def ask(self, action: Action) -> None:
        """The dialog of a change."""
        self.push_screen(Ask(self.feed.asks, action))

    def about(self, verb: str) -> None:
        """What a verb does."""
        self.push_screen(About(verb))
