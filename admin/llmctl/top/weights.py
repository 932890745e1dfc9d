"""Which weights, under which name, and what becomes of the requests that run: asked before the plan of a reload is made."""

from __future__ import annotations

import os
from typing import Any, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.suggester import Suggester
from textual.widgets import Input, Static

from llmctl.exits import CtlError
from llmctl.top.actions import MODES, Action, reload_weights
from llmctl.top.away import away
from llmctl.top.dialogs import Over
from llmctl.top.feed import PATIENCE, Asks

_ORDER: Final = tuple(MODES)


class Choose(Over[Action | None]):
    """Ends with the change to ask for; None: leave it."""

    BINDINGS = [  # noqa: RUF012 - as textual wants it
        Binding("escape", "dismiss(None)", "leave it"),
        Binding("up", "mode(-1)", "the mode before", priority=True),
        Binding("down", "mode(1)", "the next mode", priority=True),
    ]
    AUTO_FOCUS = "#path"

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self._asks = asks
        self._mode = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = "reload weights"
            yield Static("load other weights of the same shape", markup=False)
            for name, holder, suggester in _FIELDS:
                with Horizontal(classes="field"):
                    yield Static(name)
                    field = Input(placeholder=holder, suggester=suggester() if suggester else None, id=name)
                    field.cursor_blink = False
                    yield field
            yield Static("", id="mode")
            yield Static("", classes="buttons")

    def on_mount(self) -> None:
        self.action_mode(0)
        self.buttons(("enter", "show the plan"), ("tab", "next field"), ("esc", "leave it"))
        self.run_worker(self._begin(), group="ask")

    async def _begin(self) -> None:
        """The path of those that run is where others are likely to be."""
        try:
            running: dict[str, Any] = await away(lambda: self._asks.get("/v1/weights", PATIENCE))
        except CtlError:
            return
        box = self.query_one("#path", Input)
        if not box.value and running.get("path"):
            box.value = os.path.join(os.path.dirname(str(running["path"])), "")
            box.cursor_position = len(box.value)

    def action_mode(self, step: int) -> None:
        """Another mode."""
        self._mode = (self._mode + step) % len(_ORDER)
        name = _ORDER[self._mode]
        muted = self.colour("muted")
        strong = f"bold {self.colour('primary')}"
        modes = Text(" ").join(Text(f" {mode or 'as configured'} ", f"{strong} reverse" if mode == name else muted) for mode in _ORDER)
        self.query_one("#mode", Static).update(Text.assemble(("mode     ", muted), modes, ("   ↑ ↓", strong), (f"\n         {MODES[name]}", muted)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        path, version = (self.query_one(f"#{name}", Input).value.strip() for name in ("path", "version"))
        if path:
            self.dismiss(reload_weights(path, version, _ORDER[self._mode]))


class Paths(Suggester):
    """The first file or directory that goes on as was typed, on this machine."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        return await away(lambda: _completed(value))


def _completed(value: str) -> str | None:
    directory, name = os.path.split(value)
    if not os.path.isabs(directory):
        return None
    try:
        found = min((entry for entry in os.scandir(directory) if entry.name.startswith(name) and entry.name[:1] != "."), key=lambda entry: entry.name)
    except (OSError, ValueError):
        return None
    return os.path.join(directory, found.name) + ("/" if found.is_dir() else "")


_FIELDS: Final = (("path", "a GGUF file or a model's directory", Paths), ("version", "their name; empty: made from the files", None))
