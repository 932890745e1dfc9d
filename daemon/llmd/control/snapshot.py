"""What the supervisor tells control in answer to each report: the truth about processes. Unknown fields are ignored."""

from __future__ import annotations

import signal
from typing import Any, Literal

import msgspec
from msgspec import Struct

ProcessState = Literal["starting", "running", "backoff", "stopping", "exited"]

#: Why a process ended, where llmd itself wanted it to: not an error.
WANTED_EXITS = frozenset({"stop", "reload"})


class LastExit(Struct, frozen=True, kw_only=True):
    """How the previous incarnation ended."""

    status: int
    """Exit status; negative: killed by that signal."""
    reason: str = "exit"
    """exit, signal, hang, stop or reload."""
    age_s: float = 0.0
    stderr: str = ""
    """Its last lines."""

    @property
    def text(self) -> str:
        """`killed by SIGKILL`, `exited with status 70`, or that it was meant."""
        if self.reason == "reload":
            return "is replaced, as asked"
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            return f"killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"killed by signal {-self.status}"


class ProcessView(Struct, frozen=True, kw_only=True):
    """One child of the supervisor. `pid` 0: none now."""

    name: str
    role: str
    rank: int
    group: str
    pid: int = 0
    state: ProcessState = "starting"
    incarnation: int = 0
    restarts: int = 0
    """Starts after an end that nobody wanted."""
    replaced: int = 0
    """Starts after an end that was asked for: a restart, a reload."""
    uptime_s: float = 0.0
    last_exit: LastExit | None = None
    backoff_s: float = 0.0
    recent_restarts: int = 0
    """Those of its group that count against the budget now."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """The supervisor and its children at one moment."""

    start_id: str
    pid: int
    uptime_s: float = 0.0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    epoch: int = 0
    stopping: bool = False
    drain_left_s: float | None = None
    managed: bool = False
    """systemd runs it, and alone can start it anew."""
    hangups: int = 0
    """SIGHUPs that the supervisor has got."""
    processes: tuple[ProcessView, ...] = ()
    unwritten_crashes: tuple[dict[str, Any], ...] = ()
    """The newest records that no disk has taken, oldest first."""

    def process(self, name: str) -> ProcessView | None:
        return next((p for p in self.processes if p.name == name), None)

    def same_as(self, other: Snapshot | None) -> bool:
        """Whether nothing but ages differs."""
        return other is not None and self._facts() == other._facts()

    def _facts(self) -> object:
        return self.epoch, self.stopping, [(p.name, p.pid, p.state, p.incarnation, p.restarts, p.replaced) for p in self.processes]


class Report(Struct, frozen=True, kw_only=True):
    """What control tells the supervisor."""

    state: str
    stage: str
    reason: str
    status: str
    """Text for systemd's STATUS=."""
    progress: float = 0.0
    """Share of the stage that is done."""
    progressing: bool
    up: bool
    """READY is about to be reached, or has been: a death does not end the start any more."""
    ready: bool
    """The first READY has been reached."""
    requests: int
    """In flight now."""
    phases: dict[str, str] = {}
    """What each process was doing when it was last heard of; in the record of a crash."""
    weights_version: str = ""
    reloading: bool = False
    """Something is being reloaded, whatever the state."""


def decode(text: bytes) -> Snapshot:
    """JSON -> Snapshot. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Snapshot)
