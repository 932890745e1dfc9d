"""Verdicts: who has stopped, and who only waits or works."""

from __future__ import annotations

from typing import Any

import pytest

from llmd.config.server_args import SupervisionArgs
from llmd.control.snapshot import ProcessView, Snapshot
from llmd.control.table import Worker
from llmd.control.watchdog import HELPER_START_SILENCE, START_SILENCE, Verdict, judge

NOW = 1000.0
LIMITS = SupervisionArgs(hang_timeout=30.0, helper_timeout=5.0, startup_timeout=600.0)


def worker(role: str = "scheduler", rank: int = 0, *, silent: float = 0.0, still: float = 0.0, ready: bool = True, **more: Any) -> Worker:
    made = Worker(role, rank, 100 + rank, 1, 1, b"id", heard_at=NOW - silent, progress_at=NOW - still, ready=ready)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def snapshot(**facts: Any) -> Snapshot:
    view = ProcessView(**{"name": "scheduler-0", "role": "scheduler", "rank": 0, "group": "engine", "pid": 7, "state": "running", "incarnation": 1, **facts})
    return Snapshot(start_id="x", pid=1, processes=(view,))


def verdicts(*workers: Worker, picture: Snapshot | None = None, since: float = 0.0, ready: int = 0) -> list[Verdict]:
    """`ready`: the incarnation of the picture's process that was ready once."""
    return judge(workers, picture, LIMITS, NOW, since, {view.name: ready for view in picture.processes} if picture else {})


@pytest.mark.parametrize(
    ("who", "hangs"),
    [
        (worker(silent=29), False),
        (worker(silent=31), True),
        (worker("detokenizer", silent=4), False),
        (worker("detokenizer", silent=6), True),
        (worker("frontend", silent=6), True),
        (worker(phase="busy", step_age_s=31.0), True),
        (worker(phase="busy", step_age_s=29.0), False),
        (worker("frontend", phase="idle", step_age_s=6.0), True),
        (worker(phase="blocked on detokenizer", step_age_s=500.0), False),
        (worker(phase="idle", step_age_s=0.0, still=5000), False),
        # A long load beats and gets on; it is no hang however long it takes.
        (worker(ready=False, stage="loading weights", still=599, step_age_s=599.0, phase="busy"), False),
        (worker(ready=False, stage="loading weights", still=601), True),
        (worker("frontend", ready=False, silent=START_SILENCE - 1), False),
        (worker("frontend", ready=False, silent=START_SILENCE + 1), True),
    ],
)
def test_one_process(who: Worker, hangs: bool) -> None:
    assert [v.name for v in verdicts(who)] == ([who.name] if hangs else [])


def test_the_verdict_names_the_rank_that_stopped_not_those_that_wait_for_it() -> None:
    waiting = [worker(rank=n, phase="busy", step_age_s=40.0) for n in (0, 1, 3)]
    stopped = worker(rank=2, silent=40)
    found = verdicts(*waiting, stopped)
    assert [(v.name, v.pid) for v in found] == [("scheduler-2", 102)]
    assert "no heartbeat" in found[0].reason


def test_a_stopped_detokenizer_is_named_and_the_scheduler_blocked_on_it_is_not() -> None:
    found = verdicts(worker(phase="blocked on detokenizer", step_age_s=60.0), worker("detokenizer", silent=60))
    assert [v.name for v in found] == ["detokenizer-0"]


def test_a_process_that_never_says_hello_has_the_whole_start() -> None:
    assert verdicts(picture=snapshot(uptime_s=599.0)) == []
    assert [v.pid for v in verdicts(picture=snapshot(uptime_s=601.0))] == [7]


@pytest.mark.parametrize(("role", "limit"), [("scheduler", START_SILENCE), ("detokenizer", HELPER_START_SILENCE), ("frontend", HELPER_START_SILENCE)])
def test_one_that_replaces_another_and_never_says_hello_is_found_while_requests_are_held(role: str, limit: float) -> None:
    facts = {"role": role, "name": f"{role}-0", "incarnation": 2}
    assert verdicts(picture=snapshot(uptime_s=limit - 1, **facts)) == []
    assert [v.name for v in verdicts(picture=snapshot(uptime_s=limit + 1, **facts))] == [f"{role}-0"]
    assert limit < LIMITS.hold_timeout


def test_one_that_was_ready_before_this_control_must_speak_soon() -> None:
    silent = snapshot(uptime_s=5000.0, incarnation=3)
    assert verdicts(picture=silent, since=NOW - 29, ready=3) == []
    assert [v.name for v in verdicts(picture=silent, since=NOW - 31, ready=3)] == ["scheduler-0"]


def test_one_that_only_started_before_this_control_may_still_be_importing() -> None:
    assert verdicts(picture=snapshot(uptime_s=500.0), since=NOW - 400) == []
    replaced = snapshot(uptime_s=80.0, incarnation=3, name="frontend-0", role="frontend")
    assert verdicts(picture=replaced, since=NOW - HELPER_START_SILENCE + 1, ready=2) == []
    assert [v.name for v in verdicts(picture=replaced, since=NOW - HELPER_START_SILENCE - 1, ready=2)] == ["frontend-0"]


@pytest.mark.parametrize("facts", [{"pid": 0}, {"state": "backoff"}, {"state": "stopping"}, {"role": "control"}])
def test_processes_that_need_not_speak(facts: dict[str, Any]) -> None:
    assert verdicts(picture=snapshot(uptime_s=5000.0, **facts)) == []


def test_one_that_speaks_is_not_counted_twice() -> None:
    assert verdicts(worker(pid=7), picture=snapshot(uptime_s=5000.0)) == []
