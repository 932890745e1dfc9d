"""`Feed`: the choices of one request that has more of them than it may have with the engine at once. They go there piece by piece.

So that a batch larger than the queue gets done, and leaves room in it for others. Pure; `Flights` moves the choices.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from llmd.frontend.engine_view import EngineView
from llmd.frontend.req_state import Generation, ReqState

#: Seconds until a choice that found the queue full, and of whose siblings none is with the engine, is tried again.
AGAIN_S: Final = 0.2


class Feed:
    """`most`: choices that may be with the engine at once; fewer after it has refused one, and one more each time that one is done."""

    def __init__(self, generation: Generation, most: int, weights: str) -> None:
        self.generation = generation
        self.weights = weights
        """Those of the first choice, and so of all."""
        self._waiting = deque(generation.choices)
        self._most = self._now = most
        self._out = 0
        self._done = 0

    def next(self) -> ReqState | None:
        """The next choice for the engine, None where it has enough."""
        if not self._waiting or self._out >= self._now:
            return None
        self._out += 1
        return self._waiting.popleft()

    def over(self) -> None:
        """One that was with the engine is done."""
        self._out, self._done = self._out - 1, self._done + 1
        self._now = min(self._most, self._now + 1)

    def take_back(self, state: ReqState) -> bool:
        """The engine's queue was full; False: the request has nothing there, and had nothing, so that its client should hear of it."""
        self._out -= 1
        if not self._out and not self._done:
            return False
        self._waiting.appendleft(state)
        self._now = max(1, self._out)
        return True

    @property
    def stuck(self) -> bool:
        """Nothing that is under way will end and call for the next one."""
        return self._out == 0 and bool(self._waiting)


def share(view: EngineView) -> int:
    """Choices that one request may have with the engine at once: those that can run, and half of those that may wait."""
    return max(1, view.most_running + view.most_held // 2)
