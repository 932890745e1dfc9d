"""Why the daemon is said not to be whole: what stands still, what waits for its restart, what is about to end llmd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmd.config.server_args import RestartArgs, SupervisionArgs
from llmd.control.lifecycle import Lifecycle
from llmd.control.snapshot import ProcessView, Snapshot
from llmd.control.table import Worker
from llmd.control.watchdog import standstill
from llmd.control.wholeness import reasons

NOW = 1000.0
LIMITS = SupervisionArgs(hang_timeout=30.0, helper_timeout=5.0, restart=RestartArgs(max=5, window=600.0))


def worker(role: str = "scheduler", *, silent: float = 0.0, step: float = 0.0, phase: str = "busy", ready: bool = True) -> Worker:
    return Worker(role, 0, 100, 1, 1, b"id", heard_at=NOW - silent, progress_at=NOW, ready=ready, step_age_s=step, phase=phase)


def core_of(*workers: Worker, state: str = "ready", limits: SupervisionArgs = LIMITS, crashes: int = 0, **scheduler: Any) -> Any:
    view = ProcessView(**{"name": "scheduler-0", "role": "scheduler", "rank": 0, "group": "engine", "pid": 7, **scheduler})
    return SimpleNamespace(
        machine=SimpleNamespace(state=state),
        boot=SimpleNamespace(processes=(), args=SimpleNamespace(supervision=limits)),
        table=list(workers),
        supervised=lambda: list(workers),
        stalled=False,
        snapshot=Snapshot(start_id="x", pid=1, processes=(view,), unwritten_crashes=({"id": "a"},) * crashes),
        snapshot_at=NOW,
        degraded=(),
    )


def said(core: Any) -> list[str]:
    return list(reasons(core, NOW).values())


@pytest.mark.parametrize(
    ("who", "text"),
    [
        (worker(silent=14), ""),
        (worker(silent=16), "scheduler-0 has said nothing for 16 s; it is ended at 30 s"),
        (worker(step=20.0, silent=1), "scheduler-0 is in one step (busy) for 20 s; it is ended at 30 s"),
        (worker("frontend", silent=3), "frontend-0 has said nothing for 3 s; it is ended at 5 s"),
        (worker(step=20.0, phase="blocked on detokenizer"), ""),
        (worker(silent=20, ready=False), ""),
    ],
)
def test_what_stands_still_is_a_reason(who: Worker, text: str) -> None:
    assert standstill(who, LIMITS, NOW) == text
    assert [reason for reason in said(core_of(who)) if "ended at" in reason] == ([text] if text else [])


@pytest.mark.parametrize(
    ("count", "budget", "warned"), [(3, 5, False), (4, 5, True), (5, 5, True), (1, 1, True), (0, 1, False), (0, 0, False), (900, 1000, False)]
)
def test_a_budget_that_is_nearly_spent_is_a_reason(count: int, budget: int, warned: bool) -> None:
    core = core_of(recent_restarts=count, limits=SupervisionArgs(restart=RestartArgs(max=budget, window=600.0)))
    times = "once" if count == 1 else f"{count} times"
    assert said(core) == ([f"scheduler-0 died {times} within 10 min; after {budget} restarts the next death ends llmd"] if warned else [])


def test_a_wait_for_a_restart_says_how_long_and_which_it_is() -> None:
    core = core_of(state="recovering", pid=0, backoff_s=7.6, recent_restarts=3)
    assert said(core) == ["scheduler-0 is started again in 8 s (restart 3 of 5 within 10 min)"]
    core.snapshot_at = NOW - 8
    assert said(core) == []


def test_records_that_no_disk_takes_are_a_reason() -> None:
    assert "cannot be written" in said(core_of(crashes=1))[0]


@pytest.mark.parametrize("state", ["loading", "stopping"])
def test_nothing_is_said_of_a_start_or_a_stop(state: str) -> None:
    assert said(core_of(worker(silent=20), state=state)) == []


def test_seconds_that_go_by_are_no_news() -> None:
    core, told = core_of(), []
    core.events = SimpleNamespace(emit=lambda kind, message, **_: told.append(message))
    lifecycle = Lifecycle(core)
    for reason in ("silent for 16 s", "silent for 17 s"):
        lifecycle._note_degraded({"still scheduler-0": reason})
        assert core.degraded == (reason,)
    lifecycle._note_degraded({})
    lifecycle._note_degraded({})
    assert told == ["degraded: silent for 16 s", "whole again"] and core.degraded == ()
