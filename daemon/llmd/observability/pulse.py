"""The pulse of a work loop: what it does and since when, written by the loop, read by the heartbeat thread."""

from __future__ import annotations

import time


def next_tick(period: float) -> float:
    """The next moment (monotonic) that is a multiple of `period` seconds: the same one in every process of the machine.

    What is done at ticks costs less than what is done at any time: processes, and what waits for them, wake once for all of it."""
    now = time.monotonic()
    return now - now % period + period


class Pulse:
    """`step_age_s` of a heartbeat is how long the loop has been in one step, so a hang shows even while other threads live.

    A loop that blocks in a poller calls `begin` before a step and `end` after it; an event loop, which is never known to
    be idle, is made with `always=True` and calls `beat` on a timer.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._since = time.monotonic()
        self.phase = "idle"
        self.steps = 0

    def begin(self, phase: str = "busy") -> None:
        """A step starts."""
        self._since = time.monotonic()
        self.phase = phase

    def end(self) -> None:
        """The step is over; the loop may now wait for as long as it likes."""
        self.steps += 1
        self.phase = "idle"

    def beat(self) -> None:
        """The event loop still turns."""
        self._since = time.monotonic()
        self.steps += 1

    def forgive(self, seconds: float) -> None:
        """The whole process stood still for so long (a frozen group, a paused machine): no step is to blame for that."""
        self._since += seconds

    @property
    def step_age_s(self) -> float:
        """Seconds in the current step, 0 when idle."""
        if self.phase == "idle" and not self._always:
            return 0.0
        return max(0.0, time.monotonic() - self._since)
