"""Signals and deadlines while llmd starts, before supervisord's loop takes the signals. Imports nothing heavy: it is there first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """Asked to stop before there was anything to stop."""


class Overdue(Exception):
    """What was being done took too long."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT raise Interrupted in here, until somebody else takes these signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Overdue in here after `seconds`, whatever the process waits for."""

    def overdue(number: int, frame: FrameType | None) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
