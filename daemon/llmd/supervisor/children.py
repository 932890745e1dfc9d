"""What the supervisor knows of each child: how often it was started, how it ended. The table behind status and last_exit."""

from __future__ import annotations

import signal
from typing import Any, Final, Literal

from msgspec import Struct

from llmd.plan.spec import ProcessSpec

Reason = Literal["exit", "signal", "hang", "stop", "reload", "spawn"]
#: Those of an end that was asked for: what comes after it is a replacement, and no restart.
WANTED: Final = frozenset({"stop", "reload"})


class LastExit(Struct, frozen=True):
    """How the latest ended incarnation of a process ended."""

    status: int
    """Negative: the signal's number."""
    reason: Reason
    at: float
    """Monotonic."""
    stderr: str
    """Its last lines."""

    @property
    def ended(self) -> str:
        """What it did, as a sentence about it says."""
        if self.reason == "hang":
            return f"hung and was killed with {self.describe()}"
        return self.describe() if self.reason == "spawn" else f"ended with {self.describe()}"

    def describe(self) -> str:
        """`status 3`, `signal 9 (SIGKILL)`."""
        if self.reason == "spawn":
            return "could not be started"
        return describe_status(self.status)


class Child:
    """One process of the plan, over all its incarnations."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.incarnation = 0
        self.started_at = 0.0
        self.expected: tuple[int, Reason] | None = None
        """(pid, reason) when we are about to end it ourselves."""
        self.last_exit: LastExit | None = None
        self.replaced = 0
        """How often it was started anew because somebody had asked for that."""

    @property
    def killed_once(self) -> bool:
        """Its first incarnation, and no other yet, was ended by a signal."""
        return self.incarnation == 1 and self.last_exit is not None and self.last_exit.status < 0

    def starts(self, now: float) -> None:
        """A new incarnation begins."""
        self.replaced += self.last_exit is not None and self.last_exit.reason in WANTED
        self.incarnation += 1
        self.started_at = now
        self.expected = None

    def ends(self, pid: int, status: int, administrative: bool, now: float, stderr: str) -> LastExit:
        """Incarnation `pid` has been reaped."""
        reason: Reason = "signal" if status < 0 else "exit"
        if self.expected is not None and self.expected[0] == pid:
            reason = self.expected[1]
        elif administrative:
            reason = "stop"
        self.expected = None
        self.last_exit = LastExit(status, reason, now, stderr)
        return self.last_exit

    def snapshot(self, pid: int, state: str, now: float, backoff_s: float, recent: int) -> dict[str, Any]:
        """As the answer to a report shows it; `recent`: restarts of its group that count now."""
        last = self.last_exit
        return {
            "name": self.spec.name,
            "role": self.spec.role,
            "rank": self.spec.rank,
            "group": self.spec.group,
            "pid": pid,
            "state": state,
            "incarnation": self.incarnation,
            "restarts": max(0, self.incarnation - 1 - self.replaced),
            "replaced": self.replaced,
            "uptime_s": round(now - self.started_at, 3) if pid else 0.0,
            "last_exit": last and {"status": last.status, "reason": last.reason, "age_s": round(now - last.at, 3), "stderr": last.stderr},
            "backoff_s": round(backoff_s, 3),
            "recent_restarts": recent,
        }


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
