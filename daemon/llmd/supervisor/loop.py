"""The embedded supervisord: its loop, with llmd's mind (`Core`) in place of its own restarts and stops. Also `Core`'s hands.

supervisord's own shutdown is never entered (it refuses every RPC from then on); llmd stops its children itself and leaves the loop.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from supervisor import events
from supervisor.medusa import asyncore_25 as asyncore
from supervisor.options import signame
from supervisor.states import ProcessStates
from supervisor.supervisord import Supervisor

from llmd.errors import GaveUp, LlmdError, exhausted
from llmd.supervisor.core import Core
from llmd.supervisor.facts import Report
from llmd.supervisor.logsink import LogSink
from llmd.supervisor.options import LlmdOptions
from llmd.supervisor.reports import Burst, ReportSocket
from llmd.supervisor.wakeup import Wakeup

log = logging.getLogger(__name__)

_STATE_WORDS = {ProcessStates.STARTING: "starting", ProcessStates.RUNNING: "running", ProcessStates.STOPPING: "stopping"}
#: What `events` calls our events to control.
EVENT_TYPE = "llmd"


class LlmdSupervisor(Supervisor):  # type: ignore[misc]
    """`core` is given after construction, because it needs these hands."""

    core: Core

    def __init__(self, options: LlmdOptions, sink: LogSink, reports: Path) -> None:
        """`reports`: where control's come in."""
        super().__init__(options)
        self._sink = sink
        self._wakeup = Wakeup()
        self._reports = ReportSocket(reports, self.report)
        self._bad_reports = Burst()
        self._processes: dict[str, Any] = {}
        self._interrupts = 0
        self.unwritten: Callable[[], list[dict[str, Any]]] = list
        """The records of crashes that could not be written."""

    def main(self) -> int:
        """Run until the children are gone. Returns llmd's exit status."""
        try:
            super().main()
        except asyncore.ExitNow:
            pass
        finally:
            self._wakeup.close()
            self._reports.close()
            self.options.close_httpservers()
        return self.core.exit_status or 0

    # ---------------------------------------------------------------- the loop

    def add_process_group(self, config: Any) -> bool:
        """Remembers the processes by name."""
        added = super().add_process_group(config)
        self._processes.update(self.process_groups[config.name].processes)
        return bool(added)

    def runforever(self) -> None:
        """As supervisord's, awake for signals and deadlines."""
        events.subscribe(events.ProcessStateStartingEvent, self._on_starting)
        self._wakeup.install()
        self._wakeup.kick()
        super().runforever()

    def reap(self, once: bool = False, recursionguard: int = 0) -> None:
        """All ended children. supervisord reaps after it has sent events, so the next poll must end at once."""
        while True:
            pid, status = self.options.waitpid()
            if pid is None:
                return
            process = self.options.pidhistory.pop(pid, None)
            if process is not None:
                self._finish(process, pid, status)
                self._wakeup.kick()
            self.options.forget(pid)

    def _finish(self, process: Any, pid: int, status: int) -> None:
        name, administrative = process.config.name, process.administrative_stop
        try:
            process.finish(pid, status)
        except AssertionError:
            # supervisord asserts its state table, and would end on a failed kill(); the process is gone either way.
            log.warning("supervisord has lost track of %s", name)
            self.options.close_parent_pipes(process.pipes)
            process.pid, process.killing, process.pipes, process.dispatchers = 0, False, {}, {}
            process.state = ProcessStates.EXITED
        self._sink.finish(name)
        self.core.on_exit(name, pid, self.options.exit_code(pid) or 0, administrative)

    def handle_signal(self) -> None:
        """All signals that have come; supervisord takes one a round, and its SIGHUP restarts everything."""
        while (number := self.options.get_signal()) is not None:
            match number:
                case signal.SIGTERM | signal.SIGQUIT:
                    self.core.on_term(signame(number))
                case signal.SIGHUP:
                    self.core.on_hangup()
                case signal.SIGUSR2:
                    self._sink.reopen()
        while self._interrupts < self.options.interrupts:
            self._interrupts += 1
            self.core.on_interrupt(self._interrupts)

    def tick(self, now: float | None = None) -> None:
        """supervisord's hook of each round, at least every POLL_S."""
        super().tick(now)
        if self.core.tick():
            self._wakeup.kick()
        if self.core.exit_status is not None:
            raise asyncore.ExitNow

    def report(self, text: bytes) -> bytes:
        """control's Report -> the snapshot of all processes. One that cannot be read changes nothing; the answer is empty then."""
        try:
            report = msgspec.json.decode(text, type=Report)
        except msgspec.MsgspecError as error:
            if (kept := self._bad_reports.due(time.monotonic())) is not None:
                log.warning("a report of control is none: %s%s", error, f"; nor were {kept} before it" if kept else "")
            return b""
        mode = self.core.mode
        snapshot = self.core.report(report)
        if self.core.mode != mode:
            self._wakeup.kick()
        return msgspec.json.encode({**snapshot, "unwritten_crashes": self.unwritten()})

    def wake(self) -> None:
        """Look at everything again at once."""
        self._wakeup.kick()

    def _on_starting(self, event: Any) -> None:
        name = event.process.config.name
        self._reports.restore()
        self._sink.forget(name)
        self.core.on_starting(name)

    # ---------------------------------------------------------------- hands of the core

    def pid(self, name: str) -> int:
        return int(self._processes[name].pid or 0)

    def state(self, name: str) -> str:
        return _STATE_WORDS.get(self._processes[name].state, "exited")

    def spawn(self, name: str) -> LlmdError | None:
        process = self._processes[name]
        if process.state == ProcessStates.BACKOFF:
            process.give_up()
        elif process.state == ProcessStates.UNKNOWN:
            process.state = ProcessStates.EXITED
        self.options.spawn_error = None
        process.spawn()
        if process.pid:
            return None
        error = self.options.spawn_error
        return (error and exhausted(error)) or GaveUp(str(error or process.spawnerr or "it ended before it was seen"))

    def terminate(self, name: str) -> None:
        process = self._processes[name]
        if process.state in (ProcessStates.STARTING, ProcessStates.RUNNING):
            process.stop()

    def tell(self, word: str) -> None:
        events.notify(events.RemoteCommunicationEvent(EVENT_TYPE, word))
        self._wakeup.kick()


def seconds_left_of(supervisor: Callable[[], LlmdSupervisor | None]) -> Callable[[], float]:
    """The poller's deadline; it exists before the supervisor does."""

    def seconds_left() -> float:
        current = supervisor()
        return current.core.seconds_left() if current is not None else 0.0

    return seconds_left
