"""Named places where tests make faults happen: `LLMD_FAILPOINTS="scheduler.step=delay(1s);scheduler.prompt(CRASHME)=kill"`.

Free of cost when off: `hit` is one dictionary look-up in an empty dictionary. Armed only where `--allow-failpoints` was given.
Actions: raise, delay(TIME), kill (SIGKILL), exit(N), hang (sleep for ever), spin (burn Python), oom (exit as the kernel's
OOM killer would make it), and two that last until a test is ready, however slow its machine: delay(TIME,PATH), a delay only while
there is a file PATH, and hold(PATH), a sleep until there is none. `NAME(TEXT)` acts only where the text passed to `hit` contains TEXT.
A number before the action, `2*kill`, acts that many times only.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

from llmd.errors import UsageError

ENV = "LLMD_FAILPOINTS"

_SPEC = re.compile(r"^(?P<name>[a-z_.]+)(?:\((?P<text>[^)]*)\))?=(?:(?P<times>\d+)\*)?(?P<action>[a-z]+)(?:\((?P<arg>[^)]*)\))?$")
#: Shorter sleeps may be many.
_TELL_S = 1.0
_armed: dict[str, list[_Point]] = {}


class FailpointError(RuntimeError):
    """What the action `raise` raises."""


class _Point:
    def __init__(self, text: str | None, act: Callable[[], None], times: int | None) -> None:
        self.text, self.act, self.times = text, act, times

    def hit(self, text: str) -> None:
        if (self.text is not None and self.text not in text) or self.times == 0:
            return
        if self.times is not None:
            self.times -= 1
        self.act()


def arm(specs: str) -> None:
    """Arm the failpoints of a `;`-separated list; an empty one disarms all. Raises UsageError."""
    _armed.clear()
    for spec in filter(None, (part.strip() for part in specs.split(";"))):
        match = _SPEC.match(spec)
        if match is None:
            raise UsageError(f"{ENV}: cannot read {spec!r}", hint="NAME=ACTION or NAME(TEXT)=ACTION, separated by ;")
        point = _Point(match["text"], _action(spec, match["action"], match["arg"]), int(match["times"]) if match["times"] else None)
        _armed.setdefault(match["name"], []).append(point)


def hit(name: str, text: str = "") -> None:
    """Pass the place `name`; does nothing unless it is armed."""
    for point in _armed.get(name, ()):
        point.hit(text)


def armed() -> bool:
    """Whether any failpoint is armed in this process."""
    return bool(_armed)


def _action(spec: str, action: str, arg: str | None) -> Callable[[], None]:
    match action:
        case "raise":
            return _raise(spec)
        case "delay":
            span, _, path = (arg or "").partition(",")
            return _while(path, _sleep(spec, _seconds(spec, span)))
        case "hold" if arg:
            return _hold(spec, arg)
        case "kill" | "oom":
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            status = int(arg or 1)
            return lambda: os._exit(status)
        case "hang":
            return _sleep(spec, 1e9)
        case "spin":
            return _spin
    raise UsageError(f"{ENV}: unknown action {action!r} in {spec!r}", hint="raise, delay(1s), delay(1s,PATH), hold(PATH), kill, exit(3), hang, spin, oom")


def _sleep(spec: str, seconds: float) -> Callable[[], None]:
    def act() -> None:
        if seconds >= _TELL_S:
            os.write(2, f"failpoint {spec}\n".encode())  # so that a test knows when it is there
        time.sleep(seconds)

    return act


def _while(path: str, act: Callable[[], None]) -> Callable[[], None]:
    """`act`, where there is a file; without a path always."""

    def act_while_it_exists() -> None:
        if os.path.exists(path):
            act()

    return act_while_it_exists if path else act


def _hold(spec: str, path: str) -> Callable[[], None]:
    def act() -> None:
        if os.path.exists(path):
            os.write(2, f"failpoint {spec}\n".encode())
        while os.path.exists(path):
            time.sleep(0.01)

    return act


def _raise(spec: str) -> Callable[[], None]:
    def act() -> None:
        raise FailpointError(f"failpoint {spec}")

    return act


def _spin() -> None:
    while True:
        pass


def _seconds(spec: str, arg: str | None) -> float:
    match = re.match(r"^(\d+(?:\.\d+)?)(ms|s)$", arg or "")
    if match is None:
        raise UsageError(f"{ENV}: {spec!r} needs a time like delay(100ms)")
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0)
