"""What lies over the tabs: a change with its plan, the keys, what a verb does."""

from __future__ import annotations

import importlib
import time
from typing import Any, Final, TypeVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from llmctl.exits import CtlError
from llmctl.output import duration, one_line, plan_costs, plan_steps
from llmctl.top.actions import Action, carry_out, plan
from llmctl.top.away import away
from llmctl.top.feed import Asks
from llmctl.top.keys import CHANGING, LOOKING, TABS
from llmctl.top.words import STATES
from llmctl.verbs import VERBS, module_of

T = TypeVar("T")
_CLOSE: Final = Binding("escape,q,n", "dismiss", "close")


class Over(ModalScreen[T]):
    """Something that lies over the tabs."""

    def colour(self, name: str) -> str:
        """A colour of the theme."""
        return self.app.theme_variables.get(name, "default")

    def buttons(self, *buttons: tuple[str, str]) -> None:
        """What the keys do here: (key, what)."""
        if self.query(".buttons"):
            key = f"bold reverse {self.colour('primary')}"
            self.query_one(".buttons", Static).update(Text("   ").join(Text.assemble((f" {name} ", key), f" {what}") for name, what in buttons))


class Dialog(Over[None]):
    """Something to read, closed by a key."""

    BINDINGS = [_CLOSE]  # noqa: RUF012 - as textual wants it
    AUTO_FOCUS = "#plan"  # so that what is longer can be scrolled


class Ask(Dialog):
    """A change: what the daemon plans to do, the command line that does the same, and after a yes what came of it on each rank."""

    BINDINGS = [("y", "go", "do it"), _CLOSE]  # noqa: RUF012 - as textual wants it

    def __init__(self, asks: Asks, action: Action) -> None:
        super().__init__()
        self._asks, self._action = asks, action
        self._stage = "planning"
        """planning, asking, running or over; a yes counts only while it asks."""
        self._began = 0.0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -ends" if self._action.about.risk == "ends" else "dialog") as box:
            box.border_title = self._action.title or self._action.verb
            yield Static(Text(self._action.what), id="about")
            yield Static(Text(f"$ {one_line(self._action.line)}"), classes="line")
            with VerticalScroll(id="plan"):
                yield Static("", id="said")
            yield Static("", classes="buttons")

    def on_mount(self) -> None:
        self.query_one("#said", Static).update(Text("\nasking llmd what this would do …", self.colour("muted")))
        self.buttons(("esc", "leave it"))
        self.run_worker(self._plan(), group="ask")

    async def _plan(self) -> None:
        try:
            made = await away(lambda: plan(self._asks, self._action))
        except CtlError as error:
            self._over("refused", error)
            return
        self._say(self._planned(made))
        if made.get("refused"):
            self._stage = "over"
            self.buttons(("esc", "close"))
            return
        self._stage = "asking"
        self.buttons(("y", "do it"), ("n", "leave it"))

    def _planned(self, made: dict[str, Any]) -> Text:
        """The steps, and what they cost; or why they are refused."""
        muted = self.colour("muted")
        parts = [Text(line) for line in plan_steps(made)]
        if made.get("refused"):
            parts += [Text.assemble(("refused", f"bold {self.colour('error')}"), f"  {one_line(made['refused']['message'])}")]
            parts += [Text(one_line(made["refused"]["hint"]), muted)]
        else:
            costs = plan_costs(made)
            parts += [Text(""), *(Text.assemble(("costs  " if number == 0 else "       ", muted), cost) for number, cost in enumerate(costs or ["nothing"]))]
        return Text("\n").join([Text(""), *parts])

    def action_go(self) -> None:
        """Yes."""
        if self._stage == "asking":
            self._stage, self._began = "running", time.monotonic()
            self.run_worker(self._run(), group="ask")

    async def _run(self) -> None:
        self.buttons(("esc", "look away; it goes on"))
        self._progress({"state": "running"})
        try:
            record = await away(lambda: carry_out(self._asks, self._action, lambda said: self.app.call_from_thread(self._progress, said)))
        except CtlError as error:
            self._over("failed", error)
            return
        self._stage = "over"
        self._say(self._outcome(record))
        self.buttons(("esc", "close"))

    def _progress(self, record: dict[str, Any]) -> None:
        if self.is_mounted and self._stage == "running":
            said = f"\n{one_line(record['message'])}" if record.get("message") else ""
            lasted = duration(time.monotonic() - self._began)
            self._say(Text.assemble((f"\n{record.get('state')}", self.colour("warning")), f"  {lasted}", (said, self.colour("muted"))))

    def _outcome(self, record: dict[str, Any]) -> Text:
        """How it ended, and the result of each rank."""
        state = str(record.get("state"))
        text = Text.assemble("\n", (state, f"bold {self.colour(STATES.get(state, 'foreground'))}"))
        text.append(f"  {one_line(record['message'])}" if record.get("message") else "")
        for item in record.get("results") or []:
            fine = bool(item.get("ok"))
            said = item.get("message") or item.get("code") or ("" if item.get("answered", True) else "did not answer")
            text.append(f"\n{item.get('role')}-{item.get('rank')}  ", self.colour("muted"))
            text.append("ok" if fine else "failed", self.colour("success" if fine else "error")).append(f"  {one_line(said)}" if said else "")
        for name, value in (record.get("data") or {}).items():
            shown = ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else value
            text.append(f"\n{name.replace('_', ' ')}  ", self.colour("muted")).append(one_line(shown))
        return text

    def _over(self, state: str, error: CtlError) -> None:
        self._stage = "over"
        hint = f"\n{one_line(error.hint)}" if error.hint else ""
        self._say(Text.assemble("\n", (state, f"bold {self.colour('error')}"), f"  {one_line(error.message)}", (hint, self.colour("muted"))))
        self.buttons(("esc", "close"))

    def _say(self, text: Text) -> None:
        if self.is_mounted:
            self.query_one("#said", Static).update(text)


class Keys(Dialog):
    """All keys."""

    BINDINGS = [("question_mark", "dismiss", "close"), _CLOSE]  # noqa: RUF012 - as textual wants it

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "keys"
            with VerticalScroll(id="plan"):
                yield Static("", id="text")
            yield Static("", classes="buttons")

    def on_mount(self) -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(justify="right", style=f"bold {self.colour('primary')}")
        grid.add_column()
        grid.add_row("1-5", f"tabs: {', '.join(TABS)}")
        grid.add_row("↑ ↓", "mark a row; tab goes to the next table")
        for key in LOOKING:
            if not key.action.startswith("tab("):
                grid.add_row(key.label, key.what)
        grid.add_row("", Text("changes show their plan, and ask:", self.colour("muted")))
        for key in CHANGING:
            grid.add_row(key.label, key.what)
        self.query_one("#text", Static).update(grid)
        self.buttons(("esc", "close"))


class About(Dialog):
    """What a verb does that the dashboard does not do itself, and what to type for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._verb = name

    def compose(self) -> ComposeResult:
        verb = VERBS[self._verb]
        with Vertical(classes="dialog") as box:
            box.border_title = f"llmctl {self._verb}"
            with VerticalScroll(id="plan"):
                yield Static(Text(_text_of(self._verb)), id="text")
            yield Static(Text("\n".join(f"$ llmctl {line}" for line, _ in verb.examples or ((self._verb, ""),))), classes="line")
            yield Static("", classes="buttons")

    def on_mount(self) -> None:
        self.buttons(("esc", "close"))


def _text_of(name: str) -> str:
    """The verb's long text, with the lines of each paragraph joined."""
    text = importlib.import_module(module_of(name)).__doc__ or ""
    return "\n\n".join(part if part.startswith("    ") else " ".join(part.split("\n")) for part in text.strip().split("\n\n"))
