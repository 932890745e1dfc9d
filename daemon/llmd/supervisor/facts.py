"""What the supervisor's mind is told and what it tells: settings, control's report, a crash; and the hands it acts through."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from llmd.config.server_args import RestartArgs
from llmd.errors import LlmdError
from llmd.plan.spec import ProcessSpec
from llmd.supervisor.children import LastExit


class Settings(Struct, frozen=True, kw_only=True):
    """What the mind needs of the configuration."""

    start_id: str
    restart: RestartArgs = RestartArgs()
    drain_timeout: float = 30.0
    stop_timeout: float = 10.0
    control_timeout: float = 5.0
    startup_timeout: float = 600.0
    external_frontend: bool = False
    """The clients are in the process that started llmd: when it asks for the stop, or has died, nobody is left to drain for."""


class Report(Struct, kw_only=True):
    """What control says of itself and the daemon."""

    state: str = "starting"
    stage: str = ""
    reason: str = ""
    status: str = ""
    """Text for STATUS=."""
    progress: float = 0.0
    """Share of the stage that is done, 0 where that is not known."""
    progressing: bool = False
    up: bool = False
    """READY is about to be reached, or has been: a death does not end the start any more."""
    ready: bool = False
    """The first READY has been reached."""
    requests: int | None = None
    """In flight now."""
    phases: dict[str, str] = {}
    """What each process was doing when it was last heard of."""
    weights_version: str = ""
    reloading: bool = False
    """Something is being reloaded, whatever the state."""


class Crash(Struct, frozen=True):
    """The end of a process that nobody wanted."""

    spec: ProcessSpec
    pid: int
    incarnation: int
    epoch: int
    uptime_s: float
    end: LastExit
    why: str
    """Why it was killed, where it hung."""
    phase: str
    """What it was doing when control last heard of it."""
    weights_version: str


class Hands(Protocol):
    """What the mind can do to processes."""

    def pid(self, name: str) -> int:
        """0 when it does not run."""

    def state(self, name: str) -> str:
        """starting, running, stopping or exited."""

    def spawn(self, name: str) -> LlmdError | None:
        """Start it. Returns why that failed, or None."""

    def terminate(self, name: str) -> None:
        """SIGTERM, as an intended stop."""

    def tell(self, word: str) -> None:
        """Wake control with an event."""
