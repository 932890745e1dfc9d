"""`Replays`: whose output is asked for again after a detokenizer was lost, and whose only alone, because asking for it may be what ends detokenizers.

The first time everybody's output is asked for at once. Requests of which nothing has come when the next detokenizer is lost as well are suspects: they are
asked for one after another, and one with which a detokenizer is lost alone is condemned. Several frontends each do so for their own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

#: Seconds after which a request that was asked for again has no part in the end of a detokenizer: its restart may take that long.
SUSPECT_S: Final = 60.0
#: Suspects asked for alone; those behind them follow together. Most have nothing that could be sent again, and each takes its whole time then.
MAX_ALONE: Final = 16


class Replays:
    """Of one frontend. `ask`: have all output of that request sent again; `patience`: seconds in which a detokenizer that ends does so."""

    def __init__(self, ask: Callable[[str], None], patience: Callable[[], float]) -> None:
        self._ask = ask
        self._patience = patience
        self._asked: dict[str, tuple[float, set[str]]] = {}
        """Request -> when it was asked for, and its choices of which nothing has come since."""
        self._waiting: deque[str] = deque()
        self._alone: str | None = None
        self._choices: dict[str, list[str]] = {}
        self._count = 0
        """Suspects asked for alone since the last loss."""
        self._timer: asyncio.TimerHandle | None = None

    def lost(self, choices: Mapping[str, list[str]]) -> str | None:
        """There is a new detokenizer. `choices`: of each request in flight. Returns the request that has ended the last one, which the caller fails."""
        now = time.monotonic()
        asked = {rid for rid, (at, left) in self._asked.items() if left and now - at < SUSPECT_S}
        guilty = self._alone if self._alone in asked else None
        suspects = [rid for rid in choices if rid != guilty and (rid in asked or rid in self._waiting)]
        self.forget()
        self._choices = dict(choices)
        self._waiting = deque(suspects)
        for rid in choices:
            if rid != guilty and rid not in self._waiting:
                self._begin(rid)
        self._count = 0
        self._next()
        return guilty

    def waits(self, rid: str) -> bool:
        """Whether this request's output must not be asked for yet."""
        return rid in self._waiting

    def heard(self, rid: str, choice: str) -> None:
        """Output of that choice has come."""
        if rid in self._asked:
            self._asked[rid][1].discard(choice)
            if not self._asked[rid][1]:
                self.over(rid)

    def over(self, rid: str) -> None:
        """It has what it asked for, or is over."""
        self._asked.pop(rid, None)
        if rid in self._waiting:
            self._waiting.remove(rid)
        if rid == self._alone:
            self._next()

    def forget(self) -> None:
        """There is another engine, or another detokenizer: all begins anew."""
        self._asked, self._waiting, self._alone, self._choices = {}, deque(), None, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._alone = None
        if not self._waiting:
            return
        self._count += 1
        if self._count > MAX_ALONE:
            rest, self._waiting = self._waiting, deque()
            for rid in rest:
                self._begin(rid)
            return
        self._alone = self._waiting.popleft()
        self._timer = asyncio.get_running_loop().call_later(self._patience(), self.over, self._alone)
        self._begin(self._alone)

    def _begin(self, rid: str) -> None:
        self._asked[rid] = (time.monotonic(), set(self._choices[rid]))
        self._ask(rid)
