"""The audit says what was asked for, what it changed, what came of it, and why it failed; and who asked, also through the HTTP API."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.control.harness import READY_INFO, Stage, stage, wait_for
from tests.integration.control.test_config_reload import Reloadable

PASSED = {"X-Llmd-Passed-Key": "ops", "X-Llmd-Passed-Address": "192.0.2.7"}


@pytest.fixture
def made() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as started:
        started.start_control()
        yield started


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """The workers of these tests live in this process, and take the level that they are told."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def newest(made: Stage) -> dict[str, Any]:
    line: dict[str, Any] = made.http.get("/v1/audit?limit=1").json()["audit"][0]
    return line


def changes(made: Stage) -> list[tuple[str, str, str]]:
    return [(change["key"], change["before"], change["after"]) for change in newest(made)["changes"]]


def test_a_reload_says_each_key_with_its_old_and_its_new_value(made: Stage) -> None:
    made.kill_control()
    daemon = Reloadable(made, Path(made.boot.state_dir).parent / "llmd.yaml")
    daemon.write(http={"keep_alive": "9s"}, scheduler={"max_queued_requests": 3})
    made.http.post("/v1/config/reload")
    assert changes(made) == [("scheduler.max_queued_requests", "512", "3"), ("http.keep_alive", "75s", "9s")]
    assert (newest(made)["result"], newest(made)["message"]) == ("succeeded", "")
    daemon.write(http={"keep_alive": "9s", "workers": 2}, scheduler={"max_queued_requests": 3})
    made.http.post("/v1/config/reload")
    assert changes(made) == [("http.workers", "1", "2")], "what it was to change"
    assert (newest(made)["result"], newest(made)["code"]) == ("failed", "restart_required") and "http.workers" in newest(made)["message"]
    daemon.file.write_text('{"http": {"prot": 1}, "observability": {"tracing": {"otlp_endpoint": "http://me:s3cret@collector:4317"}}}')
    assert made.http.post("/v1/config/reload").status_code == 400
    assert "prot" in newest(made)["message"] and "tracing" in newest(made)["message"]
    assert "s3cret" not in (Path(made.boot.state_dir) / "audit.jsonl").read_text() + made.log.read_text()


def test_every_verb_says_what_it_was_given_and_what_it_did(made: Stage) -> None:
    scheduler, _, frontend = made.to_ready()
    made.http.post("/v1/log-level", json={"level": "debug", "process": "scheduler", "reason": "a look"})
    assert (newest(made)["params"], newest(made)["reason"]) == ({"level": "debug", "process": "scheduler"}, "a look")
    assert changes(made) == [("log level of scheduler-0", "info", "debug")]
    made.http.post("/v1/log-level", json={"level": "error"})
    assert ("log level of scheduler-0", "debug", "error") in changes(made) and len(changes(made)) == 2, "those that changed alike together"
    made.http.post("/v1/log-level", json={"level": "default"})
    assert (newest(made)["params"], changes(made)) == ({"level": "default"}, [("log level", "error", "info")])
    made.http.post("/v1/drain", json={"timeout_s": 5})
    assert (newest(made)["params"], changes(made)) == ({"timeout_s": 5}, [("state", "ready", "draining")])
    made.http.post("/v1/resume")
    assert changes(made) == [("state", "draining", "ready")]
    scheduler.answers["flush"] = {"pages_freed": 7}
    made.http.post("/v1/flush")
    assert newest(made)["data"] == {"pages_freed": 7}
    frontend.answers["abort"] = {"aborted": [f"r{number}" for number in range(60)]}
    made.http.post("/v1/abort", json={"all": True})
    assert newest(made)["params"] == {"all": True}
    assert len(newest(made)["data"]["aborted"]) == 51 and newest(made)["data"]["aborted"][-1] == "... and 10 more"
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    made.http.post("/v1/flush")
    assert (newest(made)["code"], newest(made)["message"]) == ("busy", "the cache is in use: requests 1 running, 0 waiting")
    made.http.post("/v1/restart", json={"wait": False})
    wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
    scheduler.link.close()
    made.supervisor.died("scheduler-0", reason="reload")
    made.supervisor.epoch = 2
    made.worker("scheduler", pid=201, incarnation=2, epoch=2).link.ready(READY_INFO)
    wait_for(lambda: newest(made)["verb"] == "restart", "the line")
    assert changes(made) == [("engine epoch", "1", "2")]


def test_what_is_refused_is_audited_within_bounds(made: Stage) -> None:
    made.to_ready()
    refused = made.http.post("/v1/flush", json={"x" * 5000: "y" * 500_000, "deep": [[[[[["z"]]]]]], "many": list(range(1000))})
    assert refused.status_code == 400
    size = (Path(made.boot.state_dir) / "audit.jsonl").stat().st_size
    assert (newest(made)["result"], size < 10_000) == ("refused", True), size
    assert newest(made)["message"].endswith("characters)")
    made.http.post("/v1/operations", json={"verb": "v" * 100_000})
    assert len(newest(made)["verb"]) == 64


def test_a_call_that_a_frontend_passes_on_is_audited_under_its_key(made: Stage) -> None:
    """Only our own frontend is believed, by its pid; here that is the process of this test."""
    workers = made.worker("scheduler", pid=101), made.worker("detokenizer", pid=102), made.worker("frontend", pid=os.getpid())
    for worker in workers:
        worker.link.ready(READY_INFO if worker is workers[0] else {})
    made.wait_state("ready")
    by = made.http.post("/v1/resume", headers=PASSED).json()["by"]
    assert (by["key"], by["address"], by["uid"]) == ("ops", "192.0.2.7", None)
    assert (newest(made)["key"], newest(made)["address"], newest(made)["uid"]) == ("ops", "192.0.2.7", None)
    event = made.http.get("/v1/events?follow=false").json()["events"][-1]
    assert (event["kind"], event["data"]["key"]) == ("operation", "ops")


def test_nobody_else_can_speak_for_a_key(made: Stage) -> None:
    made.to_ready()
    made.http.post("/v1/resume", headers=PASSED)
    assert (newest(made)["key"], newest(made)["uid"], newest(made)["pid"]) == (None, os.getuid(), os.getpid())
