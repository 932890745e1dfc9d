"""Signals and deadlines while llmd starts, before supervisord's loop takes the signals. Imports nothing heavy: it is there first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

#: Seconds until an Interrupted that got lost is raised again: Python drops what is raised inside a weak reference's or a finalizer's callback.
AGAIN_S: Final = 0.5


class Interrupted(BaseException):
    """Asked to stop before there was anything to stop. No `except Exception` may take it for a fault."""


class Overdue(BaseException):
    """What was being done took too long."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT raise Interrupted in here, until somebody else takes these signals."""

    asked = ""

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = asked or signal.Signals(number).name
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise Interrupted(asked)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is stop:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Stops and deadlines wait until the end of this: what their handlers raise would be lost, and printed, in the callbacks that Python runs after a fork.

    A child that is forked in here calls what this yields, and from then on ends by these signals.
    """
    asked = {signal.SIGTERM, signal.SIGINT, signal.SIGALRM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def let_go() -> None:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, asked)  # which may run a handler first, and so raise
        yield let_go
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        if signal.getsignal(signal.SIGALRM) is overdue:  # else a stop has been asked for meanwhile
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
