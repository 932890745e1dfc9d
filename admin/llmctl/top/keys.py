"""The keys of the dashboard: one table, from which the bindings, the help and the footer come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Key:
    """One key."""

    key: str
    """As textual names it."""
    action: str
    what: str
    shown: str = ""
    """As people name it; the same if empty."""
    footer: str = ""
    """The word for the last line of the screen, where it stands there."""

    @property
    def label(self) -> str:
        return self.shown or self.key


TABS: Final = ("Overview", "Processes", "KV cache", "Requests", "Events")

LOOKING: Final = (
    *(Key(str(number), f"tab({number})", name) for number, name in enumerate(TABS, 1)),
    Key("slash", "filter", "show only lines that hold a text; esc ends it", "/", "filter"),
    Key("s", "sort", "sort by the next column", footer="sort"),
    Key("question_mark", "help", "these keys", "?", "help"),
    Key("ctrl+p", "command_palette", "every command, by name", "^p", "commands"),
    Key("q", "quit", "end the dashboard; llmd goes on", footer="quit"),
)
CHANGING: Final = (
    Key("f", "change('flush')", "flush: forget cached prefixes", footer="flush"),
    Key("l", "change('reload')", "reload: take the changed configuration file", footer="reload"),
    Key("w", "change('weights')", "reload weights: load other ones", footer="weights"),
    Key("d", "change('drain')", "drain: take no new requests, finish the running ones", footer="drain"),
    Key("e", "change('resume')", "resume: end a drain", footer="resume"),
    Key("r", "change('restart')", "restart the engine; running requests pause and go on", footer="restart"),
    Key("a", "change('abort')", "abort the marked request (on tab 4)", footer="abort"),
)
