"""What the parts of control share: the plan, the table, the machine, the last snapshot, the ledger, and what is remembered.

It decides nothing (the lifecycle and the operations do) and waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from llmd.control.channel import Channel
from llmd.control.events import Events, Severity
from llmd.control.ledger import Ledger
from llmd.control.machine import BEFORE_READY, RESUMABLE, Change, Machine, State
from llmd.control.sharing import Sharing
from llmd.control.snapshot import WANTED_EXITS, ProcessView, Snapshot
from llmd.control.state_file import ControlState
from llmd.control.supervisor_client import SupervisorClient
from llmd.control.table import Worker, WorkerTable, is_dead
from llmd.plan.context import WorkerContext
from llmd.plan.spec import Boot
from llmd.wire.messages import ClaimNames, Heartbeat, Hello, KeyUse, Message, Publish, Ready, ReleaseNames

log = logging.getLogger("llmd.control")


class Changed:
    """Something that others should know at once. `set` ends the wait for the next turn as well."""

    def __init__(self, due: asyncio.Event) -> None:
        self._due = due
        self._new = False

    def set(self) -> None:
        self._new = True
        self._due.set()

    def take(self) -> bool:
        """Whether there was something since the last call."""
        new, self._new = self._new, False
        return new


#: The frontend of a caller that has embedded llmd: a worker that is no child of the supervisor.
_EXTERNAL = frozenset({"frontend-0"})


class Core:
    """See the module. Lives in control's one event loop."""

    def __init__(self, context: WorkerContext, supervisor: SupervisorClient, remembered: ControlState | None) -> None:
        self.context = context
        self.boot: Boot = context.boot
        self.supervisor = supervisor
        self.started = time.monotonic()
        self.resumed = remembered is not None and remembered.ready_once
        self.remembered = remembered or ControlState(start_id=self.boot.start_id)
        self.machine = self._machine_as_left()
        self.ledger = Ledger(self.remembered.ledger)
        self.events = Events(self.remembered.events)
        self.table = WorkerTable(self._worker_gone)
        self.channel = Channel(
            self.table,
            expected=frozenset(p.name for p in self.boot.processes if p.role != "control") | (_EXTERNAL if self.boot.external_frontend else frozenset()),
            believes=self._believes,
            on_message=self._message,
            on_bad_frame=lambda: self.ledger.inc("llmd_wire_bad_frames_total", channel="control"),
        )
        self._sharing = Sharing(self.table, self.channel, lambda: self.settled)
        self.snapshot: Snapshot | None = None
        self.snapshot_at = 0.0
        self.settled = not self.resumed
        """Whether the picture is whole: a replaced control says nothing to anyone before."""
        self.degraded: tuple[str, ...] = ()
        self.stalled = False
        self.model_info: dict[str, Any] = {}
        self.metrics_text = ""
        self.due = asyncio.Event()
        """The next turn of control's loop is."""
        self.changed = Changed(self.due)
        self.report_due = asyncio.Event()
        self.reconfiguring = False
        """The configuration is being reloaded."""
        self.up = self.resumed
        """All has come up, and readiness is told as soon as the supervisor knows that."""
        self.reports_made = self._reports_heard = 0
        """The number of the latest report, and of the latest one that the supervisor has answered."""
        self._heard = asyncio.Event()
        self.newly_ready: list[Worker] = []
        self.returned: dict[str, int] = {}
        """Process -> the incarnation whose readiness has been noted."""
        self.holding = self.machine.state == "draining"
        """A drain has been sent to the frontends and not been taken back."""
        self.left = 0
        """Requests that a drain still waits for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Event()

    def _machine_as_left(self) -> Machine:
        """As the control before this one has left it, if there was one."""
        if not self.resumed:
            return Machine(self._changed_state)
        left = self.remembered
        if left.state not in RESUMABLE:
            return Machine(self._changed_state, "recovering")
        return Machine(self._changed_state, left.state, left.reason, left.since)

    # ------------------------------------------------------------ who is there

    def names(self, role: str) -> list[str]:
        """The processes of a role that there are to be."""
        planned = [p.name for p in self.boot.processes if p.role == role]
        return planned + (sorted(_EXTERNAL) if role == "frontend" and self.boot.external_frontend else [])

    def expected(self, role: str) -> int:
        """Processes of a role in the plan."""
        return len(self.names(role))

    def ready_workers(self, role: str) -> list[Worker]:
        return [w for w in self.table.role(role) if w.ready]

    @property
    def frontend_pids(self) -> frozenset[int]:
        """Of our own children only, as the supervisor knows them: what embeds llmd is a caller like any other."""
        return frozenset(view.pid for view in self.snapshot.processes if view.role == "frontend" and view.pid) if self.snapshot else frozenset()

    @property
    def epoch(self) -> int:
        """The engine's epoch: the supervisor's, or a newer one that a rank has brought."""
        ranks = [w.epoch for w in self.table.role("scheduler")]
        return max([self.snapshot.epoch if self.snapshot else 0, self.remembered.epoch, *ranks])

    @property
    def engine_up(self) -> bool:
        """Whether every rank of the current epoch is ready."""
        epoch = self.epoch
        return len([w for w in self.table.role("scheduler") if w.ready and w.epoch == epoch]) == self.expected("scheduler")

    @property
    def detokenizer(self) -> Worker | None:
        return next((w for w in self.table.role("detokenizer") if w.ready), None)

    @property
    def can_generate(self) -> bool:
        """Whether tokens can become text: the engine and the detokenizer are there."""
        return self.engine_up and self.detokenizer is not None

    @property
    def shown_state(self) -> State:
        """The machine's state; `recovering` too while no frontend is there to answer, so that nobody reads `ready` where clients wait."""
        unanswered = self.settled and self.machine.state == "ready" and not self.ready_workers("frontend")
        return "recovering" if unanswered else self.machine.state

    @property
    def stopping(self) -> bool:
        return self.machine.state == "stopping" or (self.snapshot is not None and self.snapshot.stopping)

    @property
    def reason(self) -> str:
        """Why things are as they are; empty when they are as they should be."""
        return ", ".join(self.degraded) if self.machine.state == "ready" else self.machine.reason

    def slowest(self) -> Worker | None:
        """The worker that the start waits for; the engine's ranks first."""
        waiting = [w for w in self.table if not w.ready]
        return min(waiting, key=lambda w: (w.role != "scheduler", w.rank), default=None)

    def stage(self) -> tuple[str, float]:
        """What is being done, in words, and how far it is (0..1)."""
        if self.machine.state == "warming":
            return "warm-up", 0.0
        if not self.settled:
            return "control restarts", 0.0
        if self.machine.state in ("stopping", "failed"):
            return "", 0.0
        if self.can_generate and not self.never_ready:
            return "", 1.0
        name = "" if self.never_ready else self._missing()
        worker = self.table.get(name) if name else self.slowest()
        if worker is None:
            return f"{name}: {self.why_not_ready(name)}" if name else "starting processes", 0.0
        size = f", {worker.done / 2**20:.0f} of {worker.total / 2**20:.0f} MiB" if worker.total >= 2**20 else ""
        return f"{worker.name}: {worker.stage}{size}", min(1.0, worker.done / worker.total) if worker.total > 0 else 0.0

    def _missing(self) -> str:
        """The process without which no token can come, the engine's ranks first."""
        ready = {w.name for w in self.ready_workers("scheduler") if w.epoch == self.epoch} | {w.name for w in self.ready_workers("detokenizer")}
        return next((name for role in ("scheduler", "detokenizer") for name in self.names(role) if name not in ready), "")

    def why_not_ready(self, name: str) -> str:
        """What a process that is not ready is doing, in words."""
        worker, view = self.table.get(name), self.snapshot.process(name) if self.snapshot else None
        if worker is not None:
            return "of an earlier epoch" if worker.ready else worker.stage
        if view is None or view.pid:
            return "starting"
        ended = f" ({view.last_exit.text})" if view.last_exit is not None else ""
        return f"waits for its next start{ended}" if view.state == "backoff" else f"not running{ended}"

    # ------------------------------------------------------------ what comes in

    def take_snapshot(self, snapshot: Snapshot, asked: float = 0.0) -> None:
        """The supervisor's truth; `asked`: when it was asked for it."""
        previous, self.snapshot, self.snapshot_at = self.snapshot, snapshot, time.monotonic()
        for view in snapshot.processes:
            self._note_restart(view)
            self._note_death(previous, view)
        self.table.reconcile(snapshot, asked)
        self.remembered.epoch = max(self.remembered.epoch, snapshot.epoch)
        if not snapshot.same_as(previous):
            self.changed.set()

    def _believes(self, hello: Hello) -> bool:
        view = self.snapshot.process(f"{hello.role}-{hello.rank}") if self.snapshot else None
        if self.table.believes(hello, view):
            return True
        self.report_due.set()  # the snapshot may be what is old
        return False

    def _note_restart(self, view: ProcessView) -> None:
        seen = self.remembered.incarnations.get(view.name, 1)
        if view.incarnation > seen:
            reason = view.last_exit.reason if view.last_exit else "exit"
            self.ledger.inc("llmd_process_restarts_total", view.incarnation - seen, role=view.role, reason=reason)
        self.remembered.incarnations[view.name] = max(view.incarnation, seen)

    def _note_death(self, previous: Snapshot | None, view: ProcessView) -> None:
        before = previous.process(view.name) if previous else None
        if before is None or not before.pid or view.pid == before.pid:
            return
        # The supervisor has logged it as an error where it is one, and does so while control is away too.
        ended = view.last_exit
        how = ended.text if ended else "is gone"
        log.debug("%s (pid %d) %s", view.name, before.pid, how)
        wanted = self.stopping or (ended is not None and ended.reason in WANTED_EXITS)
        facts = {"status": ended.status, "reason": ended.reason} if ended else {}
        self.events.emit("process", f"{view.name} (pid {before.pid}) {how}", severity="info" if wanted else "error", process=view.name, pid=before.pid, **facts)

    def _message(self, worker: Worker, message: Message) -> None:
        match message:
            case Ready():
                if worker.role == "scheduler" and worker.rank == 0:
                    self.model_info = message.info
                    if self.never_ready:
                        self.remembered.load_s = time.monotonic() - self.started
                self.remembered.were_ready[worker.name] = worker.incarnation
                self.newly_ready.append(worker)
                self._greet(worker)
                self._note_return(worker)
                self.changed.set()
            case KeyUse() | ReleaseNames() | ClaimNames():
                if worker.role == "frontend":
                    self._sharing.take(worker, message)
            case Heartbeat():
                pass
            case _:
                if worker.beat_at == 0.0:
                    self.changed.set()

    def _greet(self, worker: Worker) -> None:
        """Tell a process that has come up what was set by hand since its configuration was written."""
        level = self.remembered.log_levels.get(worker.name)
        if level is not None:
            self.spawn(self._command([worker], "log_level", {"level": level}), "log level")
        self._clear_away(worker)
        if self.remembered.configured and worker.role in ("frontend", "scheduler"):
            self.spawn(self._command([worker], "configure", {"args": msgspec.to_builtins(self.boot.args)}), "configuration")

    def _note_return(self, worker: Worker) -> None:
        """Say once that a process that had ended is there again."""
        if worker.incarnation <= self.returned.get(worker.name, 1):
            return
        self.returned[worker.name] = worker.incarnation
        if not self.settled:
            return  # an earlier control has said it
        view = self.view(worker)
        ended = view.last_exit if view is not None and view.pid == worker.pid else None
        away = ended.age_s + time.monotonic() - self.snapshot_at if ended is not None else None
        if away is not None and worker.role == "scheduler":
            self.remembered.load_s = away
        after = f", after {away:.1f} s" if away is not None else ""
        log.info("%s is back (pid %d%s)", worker.name, worker.pid, after)
        self.events.emit("process", f"{worker.name} is back (pid {worker.pid}{after})", process=worker.name, pid=worker.pid, incarnation=worker.incarnation)

    def _worker_gone(self, worker: Worker) -> None:
        self.channel.forget(worker)
        self.changed.set()
        if worker.role == "frontend":
            self._sharing.gone(worker)
            self._tell_frontend_gone(self.table.role("scheduler"), worker.rank, worker.incarnation)

    def _clear_away(self, worker: Worker) -> None:
        """Frontends that died while control was away: `worker`, which has come up or introduced itself anew, is one's successor or held their requests."""
        if worker.role == "frontend" and worker.incarnation > 1:
            self._tell_frontend_gone(self.table.role("scheduler"), worker.rank, worker.incarnation - 1)
        elif worker.role == "scheduler":
            for frontend in self.table.role("frontend"):
                if frontend.incarnation > 1:
                    self._tell_frontend_gone([worker], frontend.rank, frontend.incarnation - 1)

    def _tell_frontend_gone(self, schedulers: Sequence[Worker], rank: int, incarnation: int) -> None:
        params = {"frontend": rank, "incarnation": incarnation}
        self.spawn(self._command(schedulers, "frontend_gone", params), "frontend_gone")

    async def _command(self, workers: Sequence[Worker], verb: str, params: dict[str, Any]) -> None:
        await self.channel.command(workers, verb, params, within=5.0)

    def _changed_state(self, change: Change) -> None:
        log.info("%s -> %s%s", change.source, change.target, f": {change.reason}" if change.reason else "", extra={"epoch": self.epoch})
        bad: Severity = "error" if change.target == "failed" else "warning" if change.target == "recovering" else "info"
        why = f": {change.reason}" if change.reason else ""
        self.events.emit(
            "state",
            f"{change.source} -> {change.target}{why}",
            severity=bad,
            source=change.source,
            target=change.target,
            reason=change.reason,
            epoch=self.epoch,
        )
        self.remembered.state, self.remembered.reason, self.remembered.since = change.target, change.reason, self.machine.since
        self.remembered.ready_once = self.remembered.ready_once or change.target == "ready"
        self.changed.set()
        self.report_due.set()

    # ------------------------------------------------------------ what goes out

    def publication(self) -> Publish:
        """All that the frontends answer from."""
        stage, progress = self.stage()
        detokenizer = self.detokenizer
        return Publish(
            state=self.machine.state,
            stage=stage,
            reason=self.reason,
            degraded=self.degraded,
            progress=progress,
            epoch=self.epoch,
            engine_up=self.engine_up,
            detokenizer_incarnation=detokenizer.incarnation if detokenizer else 0,
            weights_version=self.boot.files.weights_version,
            model=self.model_info,
            metrics=self.metrics_text,
            stalled=self.stalled,
        )

    def encode_state(self) -> bytes:
        """What goes into control.state."""
        remembered = self.remembered
        remembered.events = self.events.saved()
        remembered.files, remembered.model_path = self.boot.files, self.boot.args.model.path
        return msgspec.msgpack.encode(remembered)

    def supervised(self) -> list[Worker]:
        """Workers that may be killed when they hang: a caller that has embedded llmd is not llmd's to judge."""
        return [w for w in self.table if not (self.boot.external_frontend and w.role == "frontend")]

    @property
    def inflight(self) -> int:
        """Requests that the frontends hold: as they have last said in a heartbeat, or when a drain asked them."""
        return max(int(self.gauge("llmd_frontend_inflight") or 0), self.left)

    def gauge(self, name: str) -> float | None:
        """Sum of a gauge over the living workers; None where nobody has it."""
        values = [w.totals.gauges[name] for w in self.table if name in w.totals.gauges]
        return sum(values) if values else None

    def view(self, worker: Worker) -> ProcessView | None:
        """The supervisor's view of a worker, if it is still that process."""
        view = self.snapshot.process(worker.name) if self.snapshot else None
        return None if view is None or is_dead(worker, view) else view

    @property
    def never_ready(self) -> bool:
        return self.machine.state in BEFORE_READY

    async def reported(self, within: float = 2.0) -> None:
        """Return when the supervisor has heard how things are now (what it may be reading was made before); after `within` seconds in any case."""
        wanted = self.reports_made + 1
        self.report_due.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._reports_heard < wanted:
                    await self._heard.wait()

    def report_is_heard(self) -> None:
        """The supervisor has answered the latest report."""
        self._reports_heard = self.reports_made
        self._heard.set()
        self._heard = asyncio.Event()

    def turned(self) -> None:
        """The loop has made a turn: whoever waits in `until` looks again."""
        self._sharing.turned()
        self._turn.set()
        self._turn = asyncio.Event()

    async def until(self, over: Callable[[], bool], deadline: float) -> bool:
        """Wait until `over()`, looked at after each turn, or until `deadline` (monotonic): False then."""
        while not over():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._turn.wait(), min(left, 1.0))
        return True

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside everything else; an exception is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
