"""The configuration taken anew while running: planned, told, refused as a whole, rolled back."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmd.config.source import read
from llmd.plan.spec import Boot
from tests.daemon import Brake
from tests.integration.control.harness import READY_INFO, FakeWorker, Stage, stage, wait_for


class Reloadable:
    """A ready daemon that was started from a file."""

    def __init__(self, made: Stage, file: Path) -> None:
        self.made = made
        self.file = file
        self.base: dict[str, Any] = {
            "model": {"path": "dummy", "context_length": 128}, "admin": {"group": None},
            "supervision": {"heartbeat": "100ms", "startup_timeout": "20s"}, "http": {"drain_timeout": "2s"},
        }  # fmt: skip
        self.write()
        source = read(str(file), (), {}, allow_failpoints=True)
        made.boot = msgspec.structs.replace(made.boot, source=source, args=source.args, failpoints=True)
        made.boot.ports.boot.write_bytes(made.boot.dump())
        made.start_control()
        self.scheduler, _, self.frontend = made.to_ready()

    def write(self, **sections: dict[str, Any]) -> None:
        """Base, and `section={"key": value}` over it."""
        merged = {name: {**self.base.get(name, {}), **sections.get(name, {})} for name in {**self.base, **sections}}
        self.file.write_text(json.dumps(merged))

    def boot(self) -> Boot:
        return Boot.load(self.made.boot.ports.boot.read_bytes())


@pytest.fixture
def daemon() -> Iterator[Reloadable]:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        yield Reloadable(made, Path(directory) / "llmd.yaml")


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """The workers of these tests live in this process, and take the level that they are told."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def told(worker: FakeWorker) -> list[dict[str, Any]]:
    return [command.params["args"] for command in worker.commands if command.verb == "configure"]


def test_live_keys_are_told_to_everyone_and_kept_for_who_starts_later(daemon: Reloadable) -> None:
    made = daemon.made
    daemon.write(http={"keep_alive": "9s"}, scheduler={"max_queued_requests": 3}, observability={"log_level": "debug"}, supervision={"hang_timeout": "7s"})
    planned = made.http.post("/v1/config/reload", json={"dry_run": True}).json()["plan"]
    assert {change["key"]: (change["before"], change["after"], change["reload"]) for change in planned["changes"]} == {
        "http.keep_alive": ("75s", "9s", "live"), "scheduler.max_queued_requests": ("512", "3", "live"),
        "observability.log_level": ("info", "debug", "live"), "supervision.hang_timeout": ("30s", "7s", "live"),
    }  # fmt: skip
    assert told(daemon.frontend) == [] and planned["processes_restarted"] == []
    done = made.http.post("/v1/config/reload").json()
    assert (done["state"], len(done["data"]["changed"])) == ("succeeded", 4), done
    assert told(daemon.frontend)[-1]["http"]["keep_alive"] == 9.0
    assert told(daemon.scheduler)[-1]["scheduler"]["max_queued_requests"] == 3
    assert made.supervisor.called("configure")[-1]["log_level"] == "debug"
    assert logging.getLogger().level == logging.DEBUG, "the workers of this test"
    rows = {row["key"]: row for row in made.http.get("/v1/config").json()["values"]}
    assert (rows["http.keep_alive"]["text"], rows["http.keep_alive"]["origin"]) == ("9s", f"file {daemon.file}:1")
    assert daemon.boot().args.supervision.hang_timeout == 7.0
    assert made.http.post("/v1/config/reload").json()["data"] == {"changed": []}
    events = [event["message"] for event in made.http.get("/v1/events?follow=false").json()["events"] if event["kind"] == "config"]
    assert "http.keep_alive: 75s -> 9s" in events
    daemon.frontend.link.close()
    made.supervisor.died("frontend-0")
    fresh = made.worker("frontend", pid=203, incarnation=2)
    fresh.link.ready({})
    wait_for(lambda: told(fresh), "a frontend that comes up is told once more")


def test_how_long_the_engine_is_away_is_not_guessed_where_the_pool_comes_to_be_taken_at_the_start(daemon: Reloadable) -> None:
    def away(**memory: Any) -> float | None:
        daemon.write(memory=memory)
        plan: dict[str, Any] = daemon.made.http.post("/v1/config/reload", json={"dry_run": True}).json()["plan"]
        assert plan["processes_restarted"] == ["scheduler-0"]
        found: float | None = plan["downtime_s"]
        return found

    assert isinstance(away(max_total_tokens=4096), float)
    assert away(preallocate=True) is None


def test_a_fault_or_a_key_that_needs_a_restart_changes_nothing_at_all(daemon: Reloadable) -> None:
    made = daemon.made
    before = made.boot.ports.boot.read_bytes()
    daemon.write(http={"keep_alive": "9s", "workers": 2})
    refused = made.http.post("/v1/config/reload")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "restart_required" and "http.workers" in refused.json()["error"]["message"]
    plan = made.http.post("/v1/config/reload", json={"dry_run": True}).json()["plan"]
    assert [change["key"] for change in plan["changes"]] == ["http.workers", "http.keep_alive"] and plan["refused"]["code"] == "restart_required"
    daemon.file.write_text('{"http": {"keep_alive": 9, "prot": 1}}')
    refused = made.http.post("/v1/config/reload")
    assert refused.status_code == 400
    assert "keep_alive" in refused.json()["error"]["message"] and "prot" in refused.json()["error"]["message"]
    daemon.file.unlink()
    assert made.http.post("/v1/config/reload").status_code == 400
    assert made.boot.ports.boot.read_bytes() == before and told(daemon.frontend) == []
    assert [line["result"] for line in made.http.get("/v1/audit").json()["audit"]] == ["failed"] * 3


def test_a_process_that_refuses_brings_the_old_values_back(daemon: Reloadable) -> None:
    made = daemon.made
    daemon.frontend.answers["configure"] = ("invalid", {})
    daemon.write(http={"keep_alive": "9s"})
    failed = made.http.post("/v1/config/reload").json()
    assert failed["operation"]["state"] == "rolled_back"
    assert told(daemon.scheduler)[-1]["http"]["keep_alive"] == 75.0
    assert daemon.boot().args.http.keep_alive == 75.0
    rows = {row["key"]: row["text"] for row in made.http.get("/v1/config").json()["values"]}
    assert rows["http.keep_alive"] == "75s"


def test_an_engine_key_restarts_the_engine_and_rolls_back_when_it_fails(daemon: Reloadable) -> None:
    made = daemon.made
    daemon.write(memory={"max_total_tokens": 4096}, http={"keep_alive": "9s"})
    plan = made.http.post("/v1/config/reload", json={"dry_run": True}).json()["plan"]
    assert plan["processes_restarted"] == ["scheduler-0"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/config/reload")
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        assert daemon.boot().args.memory.max_total_tokens == 4096
        daemon.scheduler.link.close()
        made.supervisor.died("scheduler-0", reason="reload")
        made.supervisor.epoch = 2
        made.worker("scheduler", pid=202, incarnation=2, epoch=2).link.ready(READY_INFO)
        done = answer.result().json()
    assert done["state"] == "succeeded", done
    assert told(daemon.frontend)[-1]["http"]["keep_alive"] == 9.0
    daemon.write(memory={"max_total_tokens": 8192})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/config/reload")
        wait_for(lambda: len(made.supervisor.called("restartEngine")) == 2, "restart")
        made.workers[-1].link.close()
        made.supervisor.epoch = 3
        made.supervisor.died("scheduler-0", status=70, reason="exit")
        wait_for(lambda: len(made.supervisor.called("restartEngine")) == 3, "restart with the old values")
        made.supervisor.epoch = 4
        made.supervisor.processes["scheduler-0"]["last_exit"]["age_s"] = 100.0
        made.worker("scheduler", pid=204, incarnation=4, epoch=4).link.ready(READY_INFO)
        failed = answer.result().json()
    assert failed["operation"]["state"] == "rolled_back", failed
    assert daemon.boot().args.memory.max_total_tokens == 4096
    assert daemon.boot().args.http.keep_alive == 9.0, "of the reload before, nothing is lost"
    assert made.wait_state("ready")


def test_hangups_read_the_configuration_again(daemon: Reloadable) -> None:
    made = daemon.made
    daemon.write(http={"keep_alive": "9s"})
    made.supervisor.hangups = 1
    wait_for(lambda: told(daemon.frontend), "it is taken")
    wait_for(lambda: made.http.get("/v1/audit").json()["audit"], "it is audited")
    line = made.http.get("/v1/audit").json()["audit"][0]
    assert (line["verb"], line["reason"], line["uid"], line["result"]) == ("config/reload", "SIGHUP", None, "succeeded")
    assert any(report["reloading"] for report in made.supervisor.reports), "systemd hears of it"
    daemon.file.write_text("[")
    made.supervisor.hangups = 2
    wait_for(lambda: "SIGHUP: " in made.log.read_text(), "a fault is in the log")


def test_a_hangup_that_control_died_over_is_seen_to_by_the_next(daemon: Reloadable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It dies while the new values are being checked, before it has changed anything."""
    made, brake = daemon.made, Brake(tmp_path)
    made.kill_control()
    with monkeypatch.context() as patch:
        patch.setenv("LLMD_FAILPOINTS", brake.holds("store.check"))
        made.start_control(incarnation=2)
        made.wait_state("ready")
        daemon.write(model={"context_length": 64}, http={"keep_alive": "9s"})
        made.supervisor.hangups = 1
        wait_for(lambda: b"config/reload" in made.boot.ports.control_state.read_bytes(), "it has begun")
        made.kill_control()
    brake.release()
    assert daemon.boot().args.http.keep_alive == 75.0
    made.start_control(incarnation=3)
    wait_for(lambda: made.supervisor.called("restartEngine"), f"it is done, log:\n{made.log.read_text()}")
    made.supervisor.epoch = 2
    daemon.scheduler.link.close()
    made.supervisor.died("scheduler-0", reason="reload")
    made.worker("scheduler", pid=202, incarnation=2, epoch=2).link.ready(READY_INFO)
    results = wait_for(lambda: [line["result"] for line in made.http.get("/v1/audit").json()["audit"]][:2] == ["succeeded", "failed"], "both are audited")
    assert results and daemon.boot().args.http.keep_alive == 9.0
    wait_for(lambda: msgspec.msgpack.decode(made.boot.ports.control_state.read_bytes())["hangups"] == 1, "it is not done again")


def test_a_control_that_is_replaced_tells_what_the_boot_file_says(daemon: Reloadable) -> None:
    made = daemon.made
    daemon.write(http={"keep_alive": "9s"})
    assert made.http.post("/v1/config/reload").status_code == 200
    told_before = len(told(daemon.frontend))
    made.kill_control()
    made.start_control(incarnation=2)
    made.wait_state("ready")
    wait_for(lambda: len(told(daemon.frontend)) > told_before, "it is told once more")
    assert told(daemon.frontend)[-1]["http"]["keep_alive"] == 9.0
    rows = {row["key"]: row["text"] for row in made.http.get("/v1/config").json()["values"]}
    assert rows["http.keep_alive"] == "9s"
    assert made.http.post("/v1/config/reload").json()["data"] == {"changed": []}


def test_what_a_caller_has_started_has_nothing_to_read_again() -> None:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        made.start_control()
        made.to_ready()
        assert made.http.post("/v1/config/reload").status_code == 409
