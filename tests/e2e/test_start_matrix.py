"""A fault at every stage of a start, and a stop at every stage: the right status, one clear last line, in seconds, and nothing is left behind.

The full matrix runs for minutes (soak); the short one takes every stage and every action at least once.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import SLOW
from tests.starts import Start, fails


def config_with(startup_timeout: str) -> dict[str, Any]:
    return {"model": {"path": "dummy"}, "supervision": {"startup_timeout": startup_timeout, "stop_timeout": "2s"}}


#: Only a hang has to be waited for; what is merely slow, on a busy machine, must not be taken for one.
PATIENT, QUICK = config_with("60s"), config_with("6s")

#: Where it happens -> what the stage is: in the main process, in a child that works for the start, in a worker.
MAIN = ("supervisor.bind", "supervisor.plan")
CHECKS = ("store.check", "store.tokenizer")
WORKERS = (
    "scheduler.start",
    "scheduler.weights",
    "scheduler.kv",
    "scheduler.ipc",
    "detokenizer.start",
    "frontend.start",
    "frontend.http",
    "frontend.tokenizer",
    "frontend.warmup",
)
ACTIONS = ("raise", "kill", "exit(3)", "exit(78)", "hang")

FULL = [*((stage, action) for stage in (*CHECKS, *WORKERS) for action in ACTIONS), *((stage, action) for stage in MAIN for action in ("raise", "hang"))]
SHORT = [
    ("supervisor.bind", "raise"),
    ("supervisor.plan", "hang"),
    ("store.check", "kill"),
    ("store.check", "hang"),
    ("store.tokenizer", "raise"),
    ("scheduler.start", "exit(3)"),
    ("scheduler.weights", "exit(78)"),
    ("scheduler.kv", "kill"),
    ("scheduler.ipc", "raise"),
    ("detokenizer.start", "hang"),
    ("frontend.http", "raise"),
    ("frontend.tokenizer", "raise"),
    ("frontend.warmup", "raise"),
    ("frontend.warmup", "hang"),
]


def expected(stage: str, action: str) -> int:
    if action == "exit(78)":
        return 78
    return 71 if stage in CHECKS and action == "hang" else 70


def check_fault(directory: Path, stage: str, action: str) -> None:
    ended = fails(directory, QUICK if action == "hang" else PATIENT, failpoints=f"{stage}={action}", timeout=40)
    assert ended.status == expected(stage, action), ended.log[-3000:]
    last = ended.last_line
    assert f"status {ended.status}" in last, last
    role = stage.partition(".")[0]
    if stage in WORKERS:
        assert role in last or "warm-up" in last, last
        if action == "kill":
            assert "SIGKILL" in last, last
    if action == "raise" and stage != "frontend.warmup":
        assert f"failpoint {stage}" in ended.log
    assert ended.seconds < (5 if action != "hang" else 20) * 2 * SLOW


@pytest.mark.parametrize(("stage", "action"), SHORT)
def test_a_fault_at_any_stage_ends_the_start(tmp_path: Path, stage: str, action: str) -> None:
    check_fault(tmp_path, stage, action)


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "action"), FULL)
def test_every_fault_at_every_stage_ends_the_start(tmp_path: Path, stage: str, action: str) -> None:
    check_fault(tmp_path, stage, action)


def test_a_control_that_cannot_start_ends_the_start_at_once(tmp_path: Path) -> None:
    ended = fails(tmp_path, PATIENT, failpoints="control.start=raise", timeout=60)
    assert ended.status == 70
    assert "llmd could not start: control-0" in ended.last_line and "failpoint" in ended.last_line


def check_stop(directory: Path, stage: str, number: signal.Signals) -> None:
    with Start(directory, PATIENT, failpoints=f"{stage}=hang") as start:
        if stage in CHECKS:  # whose stderr is read when they have ended
            start.until(lambda: start.pid_of("llmd.store.check") != 0)
        else:
            start.until(lambda: f"failpoint {stage}" in start.log())
        start.signal(number)
        ended = start.end(10)
        assert ended.status == 0, ended.log[-3000:]
        assert "Traceback" not in ended.log


STAGES = ("supervisor.config", *MAIN, *CHECKS, "control.start", *WORKERS)


@pytest.mark.parametrize(
    ("stage", "number"),
    [("supervisor.config", signal.SIGTERM), ("store.check", signal.SIGINT), ("scheduler.weights", signal.SIGTERM), ("frontend.warmup", signal.SIGINT)],
)
def test_a_stop_during_the_start_is_a_stop(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    check_stop(tmp_path, stage, number)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stop_at_every_stage_is_a_stop(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    check_stop(tmp_path, stage, number)
