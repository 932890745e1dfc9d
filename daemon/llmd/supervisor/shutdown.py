"""The stop, as data: who gets which signal when. In order (frontends, engine, detokenizer, control), or all at once."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Set

from llmd.plan.spec import ProcessSpec

#: How long frontends have in a stop at once, to tell their clients `shutting_down`.
LAST_WORDS_S = 1.0


class StopSequence:
    """One stop. `step` says what to send now; it never sends the same signal twice to a process."""

    def __init__(self, specs: Iterable[ProcessSpec], *, status: int, why: str, quick: bool, now: float, timeout: float) -> None:
        self.status = status
        self.why = why
        self.quick = quick
        #: At this time everything that still lives is killed, whatever its turn.
        self.deadline = now + (min(LAST_WORDS_S, timeout) if quick else timeout)
        self._levels: dict[int, list[str]] = {}
        self._frontends: list[str] = []
        for spec in specs:
            self._levels.setdefault(spec.stop_order, []).append(spec.name)
            if spec.role == "frontend":
                self._frontends.append(spec.name)
        self._sent: set[tuple[str, int]] = set()

    def step(self, alive: Set[str], now: float) -> list[tuple[str, signal.Signals]]:
        """(process, signal) to send now, given who is alive."""
        if now >= self.deadline:
            wanted = [(name, signal.SIGKILL) for name in sorted(alive)]
        elif self.quick:
            wanted = [(name, signal.SIGTERM if name in self._frontends else signal.SIGKILL) for name in sorted(alive)]
        else:
            wanted = [(name, signal.SIGTERM) for name in self._turn(alive)]
        fresh = [item for item in wanted if item not in self._sent]
        self._sent.update(fresh)
        return fresh

    def _turn(self, alive: Set[str]) -> list[str]:
        for order in sorted(self._levels):
            level = [name for name in self._levels[order] if name in alive]
            if level:
                return level
        return []
