"""The bus of events: what has happened to the daemon, numbered, for whoever watches. Bounded; a late reader is told that there was more.

Numbers go on when control is replaced: the last events are in control.state. No event holds a prompt, an output or a secret.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

from msgspec import Struct

#: Events that are remembered, and those of them that survive control.
KEPT: Final = 1000
SAVED: Final = 50
#: A control that was killed may have numbered events that nobody has saved.
MARGIN: Final = 100

Kind = Literal["state", "process", "operation", "config", "degraded", "gap"]
Severity = Literal["info", "warning", "error"]


class Event(Struct, frozen=True, kw_only=True):
    """One thing that happened. `at` is Unix time."""

    seq: int
    at: float
    kind: Kind
    severity: Severity
    message: str
    data: dict[str, Any] = {}


class Events:
    """See the module. Lives in control's one event loop."""

    def __init__(self, saved: list[Event] | None = None) -> None:
        self._kept: deque[Event] = deque(saved or (), maxlen=KEPT)
        self._numbers = itertools.count(self._kept[-1].seq + MARGIN if self._kept else 1)
        self._news = asyncio.Event()
        self._over = False

    @property
    def last(self) -> int:
        """The newest number; 0 while nothing has happened."""
        return self._kept[-1].seq if self._kept else 0

    def saved(self) -> list[Event]:
        """What a successor has to know."""
        return list(itertools.islice(self._kept, max(0, len(self._kept) - SAVED), None))

    def emit(self, kind: Kind, message: str, *, severity: Severity = "info", **data: Any) -> None:
        """Something has happened."""
        self._kept.append(Event(seq=next(self._numbers), at=round(time.time(), 3), kind=kind, severity=severity, message=message, data=data))
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Control ends: whoever follows has had all."""
        self._over = True
        self._news.set()

    def since(self, seq: int) -> list[Event]:
        """All newer than `seq`, oldest first; a `gap` in front where some of them are forgotten. A number from the future starts anew."""
        if seq > self.last:
            seq = 0
        found = [event for event in self._kept if event.seq > seq]
        if 0 < seq < self._kept[0].seq - MARGIN and found:
            first = found[0]
            found.insert(0, Event(seq=first.seq - 1, at=first.at, kind="gap", severity="warning", message="older events are forgotten", data={"since": seq}))
        return found

    async def follow(self, seq: int, patience: float) -> AsyncIterator[list[Event]]:
        """Events after `seq`, as they come, until the end; an empty list whenever `patience` seconds brought none."""
        while True:
            news = self._news
            if found := self.since(seq):
                seq = found[-1].seq
                yield found
                continue
            if self._over:
                return
            try:
                await asyncio.wait_for(news.wait(), patience)
            except TimeoutError:
                yield []
