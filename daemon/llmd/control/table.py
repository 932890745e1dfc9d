"""The table of workers: what each of them has last said of itself. Filled by the channel, read by everyone in control.

It holds nothing that the workers' next Hello, Ready and Heartbeat would not bring back, so a replaced control has it again
within one heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmd.control.snapshot import ProcessView, Snapshot
from llmd.wire.messages import Heartbeat, Hello, Progress, Ready, Totals
from llmd.wire.tables import Tables


@dataclass(slots=True)
class Worker:
    """One process that has said Hello. Times are monotonic seconds."""

    role: str
    rank: int
    pid: int
    incarnation: int
    epoch: int
    identity: bytes
    heard_at: float
    progress_at: float
    """When its start last got on."""
    stage: str = "starting"
    done: int = 0
    total: int = 0
    ready: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    phase: str = "idle"
    step_age_s: float = 0.0
    steps: int = 0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    totals: Totals = field(default_factory=Totals)
    tables: Tables = field(default_factory=Tables)
    beat_at: float = 0.0
    """Last heartbeat, 0 for none yet."""
    since: float = 0.0
    """When it said its first Hello to this control."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.role}-{self.rank}"

    @property
    def doing(self) -> str:
        """In words, with how long and how far."""
        if not self.ready:
            return self.stage
        done = f"after {self.steps} step{'' if self.steps == 1 else 's'}"
        return f"{self.phase} for {self.step_age_s:.1f} s, {done}" if self.step_age_s else f"{self.phase}, {done}"

    @property
    def blocked_on(self) -> str:
        """What it waits for, from its phase; empty: nothing."""
        return self.phase.removeprefix("blocked on ") if self.phase.startswith("blocked on ") else ""


class WorkerTable:
    """Workers by name and by identity. `on_gone` is told of each worker that is dropped or replaced."""

    def __init__(self, on_gone: Callable[[Worker], None]) -> None:
        self._on_gone = on_gone
        self._by_name: dict[str, Worker] = {}
        self._by_identity: dict[bytes, Worker] = {}
        self._all: tuple[Worker, ...] = ()
        self._by_role: dict[str, tuple[Worker, ...]] = {}
        """Made anew with each change, since all of control reads them at each turn."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def get(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def by_identity(self, identity: bytes) -> Worker | None:
        return self._by_identity.get(identity)

    def role(self, role: str) -> tuple[Worker, ...]:
        """Workers of one role, by rank."""
        return self._by_role.get(role, ())

    def _changed(self) -> None:
        self._all = tuple(self._by_name.values())
        ranked = sorted(self._all, key=lambda w: w.rank)
        self._by_role = {role: tuple(w for w in ranked if w.role == role) for role in {w.role for w in ranked}}

    def hello(self, identity: bytes, message: Hello, now: float) -> Worker | None:
        """A worker introduces itself, for the first time or again. None: a late word of a process that has been replaced."""
        name = f"{message.role}-{message.rank}"
        known = self._by_name.get(name)
        if known is not None and message.incarnation < known.incarnation:
            return None
        if known is not None and (known.pid, known.incarnation) == (message.pid, message.incarnation):
            self._by_identity.pop(known.identity, None)
            known.identity, known.heard_at = identity, now
            self._by_identity[identity] = known
            return known
        if known is not None:
            self.drop(known)
        worker = Worker(message.role, message.rank, message.pid, message.incarnation, message.epoch, identity, heard_at=now, progress_at=now, since=now)
        self._by_name[name] = self._by_identity[identity] = worker
        self._changed()
        return worker

    def progress(self, worker: Worker, message: Progress, now: float) -> None:
        worker.heard_at = now
        if (message.stage, message.done) != (worker.stage, worker.done):
            worker.progress_at = now
        worker.stage, worker.done, worker.total = message.stage, message.done, message.total

    def ready(self, worker: Worker, message: Ready, now: float) -> None:
        worker.heard_at = worker.progress_at = now
        worker.ready, worker.info, worker.stage = True, message.info, "ready"

    def heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        worker.heard_at = worker.beat_at = now
        worker.phase, worker.step_age_s, worker.steps = message.phase, message.step_age_s, message.steps
        worker.rss_bytes, worker.cpu_s = message.rss_bytes, message.cpu_s
        worker.totals, worker.tables = message.totals or worker.totals, message.tables or worker.tables

    def drop(self, worker: Worker) -> None:
        """The process is gone."""
        if self._by_name.get(worker.name) is worker:
            del self._by_name[worker.name]
        if self._by_identity.get(worker.identity) is worker:
            del self._by_identity[worker.identity]
        self._changed()
        self._on_gone(worker)

    def reconcile(self, snapshot: Snapshot, asked: float = 0.0) -> None:
        """Drop workers that the supervisor knows to be dead. A worker newer than the snapshot stays; one that had said Hello before
        the snapshot was asked for (at `asked`) and is not in it was never the supervisor's."""
        for view in snapshot.processes:
            worker = self._by_name.get(view.name)
            if worker is not None and (is_dead(worker, view) or (view.pid != worker.pid and worker.since < asked)):
                self.drop(worker)

    def believes(self, message: Hello, view: ProcessView | None) -> bool:
        """Whether `message` may come from the process that it names, as far as the supervisor's last snapshot tells.

        A process that lives there is replaced by nobody; whoever is newer than the snapshot says Hello again after the next one."""
        if view is None or view.pid == message.pid:
            return True
        known = self._by_name.get(view.name)
        return message.incarnation > view.incarnation and (known is None or known.pid != view.pid)

    def forgive(self, seconds: float) -> None:
        """Control itself stood still for so long: nobody else's silence in that time counts."""
        for worker in self._by_name.values():
            worker.heard_at += seconds
            worker.progress_at += seconds


def is_dead(worker: Worker, view: ProcessView) -> bool:
    """Whether the supervisor's view of that process says that `worker` is no more."""
    return view.pid != worker.pid and view.incarnation >= worker.incarnation
