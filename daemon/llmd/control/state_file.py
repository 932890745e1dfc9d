"""RUN/private/control.state: what a replaced control cannot learn from the workers. Written aside and renamed.

The file carries the supervisor's start id; one of another start is ignored. So is a damaged one, with one WARNING.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmd.control.events import Event
from llmd.control.ledger import LedgerData
from llmd.control.machine import State
from llmd.plan.spec import ModelFiles

log = logging.getLogger(__name__)

FORMAT = 1


class Began(Struct, frozen=True, kw_only=True):
    """How things were when an operation began."""

    at: float
    """Monotonic, which means the same to all controls of one start."""
    epoch: int
    """The engine's."""
    facts: dict[str, str] = {}
    """What the operation may change."""


class ControlState(Struct, kw_only=True):
    """The remembered part of control."""

    format: int = FORMAT
    start_id: str
    state: State = "starting"
    reason: str = ""
    """Why it is in this state."""
    since: float = 0.0
    """Since when, monotonic."""
    load_s: float | None = None
    """How long the engine was away when it last started."""
    ready_once: bool = False
    epoch: int = 0
    files: ModelFiles | None = None
    """The committed weights."""
    model_path: str = ""
    incarnations: dict[str, int] = {}
    """Process name -> the incarnation up to which its restarts are counted."""
    were_ready: dict[str, int] = {}
    """Process name -> its last incarnation that has been ready."""
    ledger: LedgerData = msgspec.field(default_factory=LedgerData)
    operation: dict[str, Any] | None = None
    """The operation that runs; of several, the one that excludes others."""
    operations: list[dict[str, Any]] = []
    """The last ones, and all that run."""
    began: dict[str, Began] = {}
    """Id of a running one -> how things were then."""
    events: list[Event] = []
    """The last ones."""
    configured: bool = False
    """The configuration has been reloaded since the start: whoever comes up is told it once more."""
    hangups: int = 0
    """SIGHUPs that have been seen to."""
    log_levels: dict[str, str] = {}
    """Process -> the level that was set for it by hand."""
    previous_boot: bytes | None = None
    """During a reload: the boot file to go back to."""
    reload_epoch: int = 0
    """During a reload: the epoch before it."""


class StateFile:
    """Reads and writes the file. Not for concurrent use: one writer at a time."""

    def __init__(self, path: Path, start_id: str) -> None:
        self._path = path
        self._start_id = start_id
        self._written = b""

    def load(self) -> ControlState | None:
        """The state of this start, or None."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cannot read %s, starting without it: %s", self._path, error)
            return None
        try:
            state = msgspec.msgpack.decode(data, type=ControlState)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("%s is damaged and ignored; counters start anew: %s", self._path, error)
            return None
        if state.start_id != self._start_id or state.format != FORMAT:
            return None
        return state

    def holds(self, data: bytes) -> bool:
        """Whether `data` has been written last, so that there is nothing to write."""
        return data == self._written

    def write(self, data: bytes) -> None:
        """Replace the file by `data` (an encoded ControlState), unless it holds that already."""
        if self.holds(data):
            return
        replace_file(self._path, data)
        self._written = data


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` aside and rename it to `path`. Raises OSError naming the path."""
    try:
        aside = path.with_name(f"{path.name}.new")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
