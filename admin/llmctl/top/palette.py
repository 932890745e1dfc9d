"""The command palette: every verb of llmctl's table, and the tabs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from textual.command import DiscoveryHit, Hit, Hits, Provider

from llmctl.top.actions import ACTIONS
from llmctl.top.keys import TABS
from llmctl.verbs import VERBS

if TYPE_CHECKING:
    from llmctl.top.app import Top

#: Verbs that look at what a tab shows.
_TAB_OF: Final = {"status": 1, "ps": 2, "kv": 3, "requests": 4, "events": 5, "logs": 5}


class Verbs(Provider):
    """Verbs that change something show their plan and ask; those that look go to their tab; of the others it says what to type."""

    @property
    def _top(self) -> Top:
        app: Top = self.app  # type: ignore[assignment]  # the only one that has this provider
        return app

    def _commands(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """(name, what it does, do it)."""
        for name, action in ACTIONS.items():
            yield name, action.what, partial(self._top.ask, action)
        yield "abort", "end the marked request", partial(self._top.action_change, "abort")
        for number, tab in enumerate(TABS, 1):
            yield tab, f"tab {number}", partial(self._top.action_tab, number)
        named = {action.verb for action in ACTIONS.values()} | {"top"}
        for verb, about in VERBS.items():
            if verb in _TAB_OF:
                yield verb, about.line, partial(self._top.action_tab, _TAB_OF[verb])
            elif verb not in named:
                yield f"llmctl {verb}", about.line, partial(self._top.about, verb)

    async def discover(self) -> Hits:
        for name, what, do in self._commands():
            yield DiscoveryHit(name, do, help=what)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, what, do in self._commands():
            score = matcher.match(name) or 0.1 * (query.casefold() in what.casefold())
            if score > 0:
                yield Hit(score, matcher.highlight(name), do, help=what)
