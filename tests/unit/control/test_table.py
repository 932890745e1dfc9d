"""The worker table: incarnations, late words, and what the supervisor knows better."""

from __future__ import annotations

from llmd.control.snapshot import ProcessView, Snapshot
from llmd.control.table import Worker, WorkerTable
from llmd.wire.messages import Hello, Progress, Ready


def hello(incarnation: int = 1, pid: int = 10, role: str = "scheduler") -> Hello:
    return Hello(role=role, rank=0, pid=pid, incarnation=incarnation, epoch=incarnation)


def table() -> tuple[WorkerTable, list[Worker]]:
    gone: list[Worker] = []
    return WorkerTable(gone.append), gone


def snapshot(pid: int, incarnation: int) -> Snapshot:
    view = ProcessView(name="scheduler-0", role="scheduler", rank=0, group="engine", pid=pid, incarnation=incarnation, state="running" if pid else "backoff")
    return Snapshot(start_id="x", pid=1, processes=(view,))


def test_hello_again_keeps_what_is_known() -> None:
    it, gone = table()
    worker = it.hello(b"a", hello(), 1.0)
    assert worker is not None
    it.ready(worker, Ready(info={"x": 1}), 2.0)
    again = it.hello(b"b", hello(), 3.0)
    assert again is worker
    assert (worker.ready, worker.identity, it.by_identity(b"a"), gone) == (True, b"b", None, [])


def test_a_new_incarnation_replaces_and_a_late_word_of_the_old_is_ignored() -> None:
    it, gone = table()
    old = it.hello(b"a", hello(), 1.0)
    new = it.hello(b"b", hello(2, 11), 2.0)
    assert gone == [old]
    assert it.hello(b"a", hello(), 3.0) is None
    assert list(it) == [new]


def test_reconcile_drops_the_dead_and_keeps_what_is_newer_than_the_snapshot() -> None:
    it, gone = table()
    it.hello(b"a", hello(2, 11), 1.0)
    it.reconcile(snapshot(pid=0, incarnation=1))
    it.reconcile(snapshot(pid=11, incarnation=2))
    assert gone == []
    it.reconcile(snapshot(pid=0, incarnation=2))
    assert [w.pid for w in gone] == [11]
    assert list(it) == []


def test_progress_counts_only_when_something_has_moved() -> None:
    it, _ = table()
    worker = it.hello(b"a", hello(), 1.0)
    assert worker is not None
    it.progress(worker, Progress(stage="loading", done=1, total=9), 5.0)
    it.progress(worker, Progress(stage="loading", done=1, total=9), 50.0)
    assert (worker.progress_at, worker.heard_at) == (5.0, 50.0)
    it.forgive(10.0)
    assert (worker.progress_at, worker.heard_at) == (15.0, 60.0)


def test_nobody_replaces_a_process_that_the_supervisor_knows_to_live() -> None:
    it, gone = table()
    real = it.hello(b"a", hello(2, 11), 1.0)
    view = snapshot(pid=11, incarnation=2).process("scheduler-0")
    assert it.believes(hello(2, 11), view)
    assert not it.believes(hello(2, 666), view)
    assert not it.believes(hello(999, 666), view)
    it.reconcile(snapshot(pid=12, incarnation=3))
    assert gone == [real]
    assert it.believes(hello(3, 12), snapshot(pid=12, incarnation=3).process("scheduler-0"))


def test_a_worker_that_a_later_snapshot_does_not_know_goes() -> None:
    it, gone = table()
    forged = it.hello(b"a", hello(999, 666), 1.0)
    it.reconcile(snapshot(pid=11, incarnation=2), asked=0.5)
    assert gone == []
    it.reconcile(snapshot(pid=11, incarnation=2), asked=1.5)
    assert gone == [forged]
    assert it.hello(b"b", hello(2, 11), 2.0) is not None


def test_workers_of_a_role_come_by_rank_and_go_with_their_process() -> None:
    it, _ = table()
    late, early = (it.hello(f"f{rank}".encode(), Hello(role="frontend", rank=rank, pid=20 + rank, incarnation=1, epoch=1), 1.0) for rank in (1, 0))
    scheduler = it.hello(b"a", hello(), 1.0)
    assert it.role("frontend") == (early, late) and it.role("scheduler") == (scheduler,) and it.role("detokenizer") == ()
    assert early is not None and early.name == "frontend-0"
    it.drop(early)
    assert it.role("frontend") == (late,) and list(it) == [late, scheduler]
    again = it.hello(b"f2", Hello(role="frontend", rank=0, pid=30, incarnation=2, epoch=1), 2.0)
    assert it.role("frontend") == (again, late)
