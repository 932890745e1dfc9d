"""A replaced control knows what the one before it knew, and finishes what that had begun."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.control.harness import READY_INFO, FakeWorker, Stage, stage, wait_for

Trio = tuple[Stage, FakeWorker, FakeWorker]


@pytest.fixture
def daemon() -> Iterator[Trio]:
    """A ready daemon, its scheduler and its frontend."""
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        made.start_control()
        scheduler, _, frontend = made.to_ready()
        yield made, scheduler, frontend


def begin(made: Stage, verb: str, until: Callable[[], Any] = lambda: True, **fields: Any) -> str:
    """Begin an operation that nobody waits for, and lose its control once `until()`. Its id."""
    record = made.http.post(f"/v1/{verb}", json={"wait": False, "reason": "for the night", **fields}).json()
    wait_for(lambda: record["id"].encode() in made.boot.ports.control_state.read_bytes(), "it is remembered")
    wait_for(until, "it is on its way")
    made.kill_control()
    return str(record["id"])


def operation(made: Stage, number: str) -> dict[str, Any]:
    return dict(made.http.get(f"/v1/operations/{number}").json())


def settled(made: Stage) -> None:
    wait_for(lambda: made.status().get("stage", "control restarts") != "control restarts", f"control knows, log:\n{made.log.read_text()}")


def outcome(made: Stage, number: str) -> dict[str, Any]:
    """The record of an operation that is over, and has its one line of audit."""
    settled(made)
    wait_for(lambda: operation(made, number)["state"] != "running", "it is over")
    lines = wait_for(lambda: [line for line in made.http.get("/v1/audit").json()["audit"] if line["operation_id"] == number], "the line")
    done = operation(made, number)
    assert [(line["result"], line["reason"]) for line in lines] == [(done["state"], "for the night")]
    assert made.status()["operation"] is None
    return done


def replace_engine(made: Stage, old: FakeWorker) -> None:
    old.link.close()
    made.supervisor.died("scheduler-0", reason="reload")
    made.supervisor.epoch = 2
    made.worker("scheduler", pid=202, incarnation=2, epoch=2).link.ready(READY_INFO)


@pytest.mark.parametrize("when", ["before control", "after control"])
def test_a_restart_is_finished_and_not_asked_for_twice(daemon: Trio, when: str) -> None:
    made, scheduler, _ = daemon
    number = begin(made, "restart", until=lambda: made.supervisor.called("restartEngine"))
    if when == "before control":
        replace_engine(made, scheduler)
    else:
        made.supervisor.epoch = 2
        made.supervisor.died("scheduler-0", reason="reload")
    made.start_control(incarnation=2)
    if when == "after control":
        settled(made)
        assert operation(made, number)["state"] == "running"
        replace_engine(made, scheduler)
    done = outcome(made, number)
    assert (done["state"], done["data"]) == ("succeeded", {"epoch": 2})
    assert len(made.supervisor.called("restartEngine")) == 1
    assert [change["after"] for change in done["changes"] if change["key"] == "engine epoch"] == ["2"]


def test_a_drain_is_waited_for_until_its_own_deadline(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.answers["drain"] = {"inflight": 1}
    number = begin(made, "drain", timeout_s=60)
    made.start_control(incarnation=2)
    made.wait_state("draining")
    assert operation(made, number)["state"] == "running"
    frontend.answers["drain"] = {"inflight": 0}
    assert outcome(made, number)["data"] == {"left": 0}
    assert made.status()["state"] == "draining"


def test_the_time_of_a_drain_counts_on(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.answers["drain"] = {"inflight": 1}
    number = begin(made, "drain", timeout_s=1)
    time.sleep(1.1)  # the passing of time is what is tested
    made.start_control(incarnation=2)
    done = outcome(made, number)
    assert (done["state"], done["code"]) == ("failed", "timeout")
    assert "within 1 s" in done["message"] and made.status()["state"] == "draining"


def test_a_flush_that_waits_goes_on(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    number = begin(made, "flush", timeout_s=60)
    made.start_control(incarnation=2)
    made.wait_state("ready")
    assert made.http.post("/v1/flush").json()["error"]["code"] == "flush_in_progress"
    scheduler.answers["flush"] = {"pages_freed": 3}
    assert outcome(made, number)["data"] == {"pages_freed": 3}


def test_a_reload_that_had_changed_nothing_leaves_all_as_it_was(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.answers["drain"] = {"inflight": 1}
    boot = made.boot.ports.boot.read_bytes()
    config = made.http.get("/v1/weights").json()
    # It drains for a minute, unless the facts that the check of `dummy` finds are not those of this test.
    record = made.http.post("/v1/reload", json={"path": "dummy", "wait": False, "reason": "for the night"}).json()
    wait_for(lambda: operation(made, record["id"])["state"] != "running" or made.status()["state"] == "reloading", "it drains or is refused")
    made.kill_control()
    made.start_control(incarnation=2)
    made.wait_state("ready")
    assert operation(made, record["id"])["state"] == "failed"
    assert made.boot.ports.boot.read_bytes() == boot and made.http.get("/v1/weights").json() == config


def test_state_reason_and_age_outlive_control(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    scheduler.link.close()
    made.supervisor.died("scheduler-0", status=-signal.SIGKILL)
    before = made.wait_state("recovering")
    wait_for(lambda: b"recovering" in made.boot.ports.control_state.read_bytes(), "it is written down")
    made.kill_control()
    seen = len(frontend.published)
    time.sleep(0.5)  # so that an age which began anew would show
    made.start_control(incarnation=2)
    after = made.wait_state("recovering")
    assert after["reason"] == before["reason"] == "scheduler-0 killed by SIGKILL"
    assert after["state_age_s"] > before["state_age_s"] + 0.5
    assert (after["stage"], after["progress"]) == ("scheduler-0: waits for its next start (killed by SIGKILL)", 0.0)
    published = wait_for(lambda: frontend.published[seen:], "a publication")
    assert {(p.state, p.reason, p.progress) for p in published} == {("recovering", before["reason"], 0.0)}


def test_a_new_control_says_that_it_is_new_and_nothing_else(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    made.kill_control()
    scheduler.link.close()  # so that it has not heard everybody for a while
    reports = len(made.supervisor.reports)
    made.start_control(incarnation=2)
    first = wait_for(lambda: made.supervisor.reports[reports:], "a report")[0]
    assert (first["state"], first["status"]) == ("ready", "ready; control restarts")


def test_a_frontend_that_dies_while_it_is_told_has_not_refused(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.link.close()
    made.supervisor.died("frontend-0")
    wait_for(lambda: made.status()["degraded"], "it is away")
    done = made.http.post("/v1/drain").json()
    assert (done["state"], [(r["role"], r["ok"], r["answered"]) for r in done["results"]]) == ("succeeded", [("frontend", True, False)])
    again = made.worker("frontend", pid=303, incarnation=2)
    again.link.ready()
    wait_for(lambda: "drain" in again.verbs(), "its successor drains too")
    assert made.http.post("/v1/resume").json()["state"] == "succeeded"


def test_a_flush_says_that_the_engine_is_away_or_waits_for_it(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = None
    number = made.http.post("/v1/flush", json={"timeout_s": 60, "wait": False}).json()["id"]
    wait_for(lambda: "flush" in scheduler.verbs(), "it is asked")
    scheduler.link.close()
    made.supervisor.died("scheduler-0")
    made.wait_state("recovering")
    refused = made.http.post("/v1/log-level", json={"level": "info"})
    assert refused.status_code == 200, "whoever is away is told when it is back"
    replace_engine(made, scheduler)
    wait_for(lambda: operation(made, number)["state"] == "succeeded", "the new engine has forgotten")
    assert [r["ok"] for r in operation(made, number)["results"]] == [True]
