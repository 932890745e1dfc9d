"""The daemon's state machine, as data.

Owned by control, fired by the lifecycle and by operations, shown by everything that shows a state. A transition that is not
in the table raises: that is a bug in the caller, never something to shrug off. Each transition is an event for the listener.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

from msgspec import Struct

State = Literal["starting", "loading", "warming", "ready", "recovering", "reloading", "draining", "paused", "asleep", "stopping", "failed"]
STATES: tuple[State, ...] = get_args(State)

#: States in which the daemon has never been ready yet.
BEFORE_READY: frozenset[State] = frozenset({"starting", "loading", "warming"})

#: States that a replaced control takes up again; any other one is worked out anew from the workers.
RESUMABLE: frozenset[State] = frozenset({"ready", "recovering", "reloading", "draining", "paused", "asleep"})


class Transition(Struct, frozen=True):
    """`event` leads from any of `sources` to `target`."""

    event: str
    sources: frozenset[State]
    target: State


def _row(event: str, sources: str, target: State) -> Transition:
    names = frozenset(state for state in STATES if state in sources.split())
    return Transition(event, names, target)


TRANSITIONS: tuple[Transition, ...] = (
    _row("load", "starting", "loading"),
    _row("loaded", "starting loading", "warming"),
    _row("warm", "warming", "ready"),
    _row("engine_lost", "ready reloading paused asleep", "recovering"),
    _row("engine_back", "recovering", "ready"),
    _row("reload", "ready recovering", "reloading"),
    _row("reloaded", "reloading", "ready"),
    _row("pause", "ready", "paused"),
    _row("sleep", "ready paused", "asleep"),
    _row("wake", "asleep", "recovering"),
    _row("drain", "ready recovering reloading paused asleep", "draining"),
    _row("resume", "draining paused", "ready"),
    _row("stop", "starting loading warming ready recovering reloading draining paused asleep failed", "stopping"),
    _row("fail", "starting loading warming ready recovering reloading draining paused asleep stopping", "failed"),
)

_TABLE: dict[tuple[str, State], State] = {(row.event, source): row.target for row in TRANSITIONS for source in row.sources}


class IllegalTransition(RuntimeError):
    """`event` means nothing in `state`."""


class Change(Struct, frozen=True):
    """One transition that happened. `at` is Unix time, for people."""

    seq: int
    event: str
    source: State
    target: State
    reason: str
    at: float


class Machine:
    """Holds the state. `on_change` runs at once after each transition. A replaced control begins with the state, reason and `since` of the one before."""

    def __init__(self, on_change: Callable[[Change], None], initial: State = "starting", reason: str = "", since: float | None = None) -> None:
        self._on_change = on_change
        self.state: State = initial
        self.reason = reason
        self.since = time.monotonic() if since is None else since
        """When it came into this state, monotonic."""
        self.history: deque[Change] = deque(maxlen=256)
        self._seq = 0

    def can(self, event: str) -> bool:
        """Whether `event` is legal now."""
        return (event, self.state) in _TABLE

    def fire(self, event: str, reason: str = "") -> None:
        """Make the transition `event`; raises IllegalTransition."""
        target = _TABLE.get((event, self.state))
        if target is None:
            raise IllegalTransition(f"{event!r} means nothing in state {self.state!r}")
        self._seq += 1
        change = Change(self._seq, event, self.state, target, reason, time.time())
        self.state, self.reason, self.since = target, reason, time.monotonic()
        self.history.append(change)
        self._on_change(change)
