"""How a process ended, in words: from its exit status, the signal, and what llmd and the kernel knew of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any, Final

#: What a signal that nobody of llmd sent usually means.
_SIGNALS: Final = {
    "SIGKILL": "killed from outside, not for want of memory",
    "SIGTERM": "asked to end from outside, not by llmd",
    "SIGINT": "interrupted from outside, not by llmd",
    "SIGSEGV": "crashed: a bad memory access",
    "SIGBUS": "crashed: memory that was mapped is gone (a file cut short, a disk or a memory that fails)",
    "SIGABRT": "aborted itself: a check in native code failed",
    "SIGILL": "crashed: an instruction that this CPU does not have",
    "SIGFPE": "crashed: an impossible calculation in native code",
    "SIGXCPU": "used up the CPU time that a limit allows",
    "SIGXFSZ": "wrote a file larger than a limit allows",
}
#: What a line of a text log begins with.
_HEAD: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ +[a-z]+-\d+: ")
_STATUSES: Final = {
    0: "ended by itself, without a fault",
    1: "ended: an exception that nothing caught",
    70: "ended: gave up after an internal error",
    71: "ended: the system refused something it needs (port, socket, file, memory)",
    78: "ended: this configuration or these model files cannot work",
}


def signal_name(number: int) -> str:
    """`SIGKILL`, `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended(status: object) -> str:
    """`killed by SIGKILL`, `status 70`."""
    if isinstance(status, int) and status < 0:
        return f"killed by {signal_name(-status)}"
    return f"status {status}"


def what(record: Mapping[str, Any]) -> str:
    """What happened, of one record of a crash."""
    status, reason, why = record.get("status"), record.get("reason"), str(record.get("why") or "")
    if reason == "hang":
        return f"hung ({why}), so llmd killed it" if why else "hung, so llmd killed it"
    if record.get("oom"):
        return "killed by the kernel: out of memory (SIGKILL)"
    if reason == "spawn":
        return "could not be started"
    if not isinstance(status, int):
        return str(record.get("how") or "is gone")
    if status < 0:
        name = signal_name(-status)
        return f"{_SIGNALS[name]} ({name})" if name in _SIGNALS else f"ended by {name}"
    return f"{_STATUSES.get(status, 'ended')} (status {status})"


def last_words(record: Mapping[str, Any]) -> str:
    """The last thing that it said, of records that do not name it the last of all lines."""
    said = record.get("last_words")
    return _HEAD.sub("", str(said if said is not None else next(iter(reversed(record.get("last_lines") or [])), "")), count=1)
