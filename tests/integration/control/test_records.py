"""What is planned, replayed, conflicting, audited and told as it happens."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.wire.tables import OwnedRequest, Tables
from tests.daemon import SLOW
from tests.integration.control.harness import READY_INFO, FakeWorker, Stage, stage, wait_for

Trio = tuple[Stage, FakeWorker, FakeWorker]


@pytest.fixture
def daemon() -> Iterator[Trio]:
    """A ready daemon, its scheduler and its frontend."""
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        made.start_control()
        scheduler, _, frontend = made.to_ready()
        yield made, scheduler, frontend


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """The workers of these tests live in this process, and take the level that they are told."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def owned(rid: str, tokens: int, client: str = "") -> OwnedRequest:
    return OwnedRequest(rid, rid, client, 5.0, 40, tokens, 100, 1.0, 0.1, True)


def audit(made: Stage) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = made.http.get("/v1/audit").json()["audit"]
    return lines


def test_a_dry_run_plans_and_changes_nothing(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    frontend.tables = Tables(owned=[owned("a", 30), owned("b", 4, "job")], requests_total=2)
    scheduler.meter.set("llmd_kv_pages", 12, state="cached")
    wait_for(lambda: made.status()["kv"]["pages_cached"] == 12 and made.http.get("/v1/requests").json()["total"] == 2, "tables")
    sent = len(scheduler.commands), len(frontend.commands)

    def plan(verb: str, **params: Any) -> dict[str, Any]:
        reply = made.http.post(f"/v1/{verb}", json={**params, "dry_run": True})
        assert reply.status_code == 200, reply.text
        assert reply.json()["dry_run"] is True
        found: dict[str, Any] = reply.json()["plan"]
        return found

    assert plan("flush")["pages_forgotten"] == 12
    assert (plan("abort", rid="a")["requests"], plan("abort", client_id="job")["requests"], plan("abort", rid="zz")["requests_aborted"]) == (["a"], ["b"], 0)
    assert plan("abort", all=True)["tokens_dropped"] == 34
    restart = plan("restart")
    assert (restart["processes_restarted"], restart["requests_held"], restart["requests_aborted"]) == (["scheduler-0"], 2, 0)
    assert isinstance(restart["downtime_s"], float) and restart["drains_first_s"] is None
    assert plan("stop")["processes_stopped"] == ["control-0", "frontend-0", "detokenizer-0", "scheduler-0"]
    assert (plan("drain")["requests_finished"], plan("drain", timeout_s=9)["requests_finished"]) == (0, 2), "without a time nothing is waited for"
    assert plan("abort", client_id="nobody")["steps"] == ["nothing: no request in flight matches"]
    assert plan("abort", client_id="job")["steps"] == ["end them with the error `aborted`"]
    assert made.http.post("/v1/operations", json={"verb": "restart", "dry_run": True}).json()["plan"] == restart
    refused = made.http.post("/v1/abort", json={"dry_run": True})
    assert refused.status_code == 400, "what would be refused is refused"
    assert (len(scheduler.commands), len(frontend.commands)) == sent
    assert audit(made) == [] and made.http.get("/v1/operations").json()["operations"] == []


def test_a_real_run_shows_the_plan_it_carried_out(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.answers["abort"] = {"aborted": ["a"]}
    frontend.tables = Tables(owned=[owned("a", 7)], requests_total=1)
    wait_for(lambda: made.http.get("/v1/requests").json()["total"] == 1, "tables")
    wanted = made.http.post("/v1/abort", json={"rid": "a", "dry_run": True}).json()["plan"]
    done = made.http.post("/v1/abort", json={"rid": "a"}).json()
    assert (done["plan"]["requests"], done["plan"]["tokens_dropped"]) == (wanted["requests"], 7) == (["a"], 7)
    by = done["by"]
    assert (by["uid"], by["gid"], by["pid"], by["key"], by["address"]) == (os.getuid(), os.getgid(), os.getpid(), None, None)


def test_a_key_runs_once_and_replays(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = {"pages_freed": 7}
    key = {"Idempotency-Key": "k-1"}
    first = made.http.post("/v1/flush", headers=key).json()
    again = made.http.post("/v1/flush", headers=key).json()
    assert first == again and scheduler.verbs().count("flush") == 1
    other = made.http.post("/v1/resume", headers=key)
    assert (other.status_code, other.json()["error"]["param"]) == (409, "Idempotency-Key")
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    failed = [made.http.post("/v1/flush", headers={"Idempotency-Key": "k-2"}) for _ in range(2)]
    assert [reply.status_code for reply in failed] == [409, 409]
    assert failed[0].json() == failed[1].json() | {"error": failed[0].json()["error"]}
    assert scheduler.verbs().count("flush") == 2
    wait_for(lambda: "flush: failed: the cache is in use" in made.log.read_text(), "the log says why")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(made.http.post, "/v1/flush?timeout_s=60", headers={"Idempotency-Key": "k-3"}) for _ in range(2)]
        wait_for(lambda: (made.status()["operation"] or {}).get("key") == "k-3", "it runs")
        scheduler.answers["flush"] = {"pages_freed": 1}
        one, two = (reply.result().json() for reply in both)
    assert one["id"] == two["id"] and one["state"] == "succeeded"
    assert made.http.post("/v1/flush", headers={"Idempotency-Key": "x" * 200}).status_code == 400
    made.kill_control()
    made.start_control(incarnation=2)
    made.wait_state("ready")
    assert made.http.post("/v1/flush", headers=key).json()["id"] == first["id"], "a replaced control knows it too"


def test_a_conflict_names_its_holder_and_an_operation_may_be_left_alone(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    begun = made.http.post("/v1/restart", json={"wait": False})
    assert begun.status_code == 202
    record = begun.json()
    assert begun.headers["location"] == f"/v1/operations/{record['id']}"
    wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
    refused = made.http.post("/v1/flush").json()["error"]
    assert (refused["code"], refused["operation_id"]) == ("busy", record["id"])
    assert record["id"] in refused["hint"]
    scheduler.link.close()
    made.supervisor.died("scheduler-0", reason="reload")
    made.supervisor.epoch = 2
    made.worker("scheduler", pid=201, incarnation=2, epoch=2).link.ready(READY_INFO)
    wait_for(lambda: made.http.get(begun.headers["location"]).json()["state"] == "succeeded", "it is done")
    assert made.http.post("/v1/lora/load", json={"name": "x"}).status_code == 501


def test_audit_is_bounded_and_newest_first(daemon: Trio) -> None:
    made, _, _ = daemon
    for number in range(3):
        made.http.post("/v1/resume", json={"reason": f"try {number}"})
    assert [line["reason"] for line in audit(made)] == ["try 2", "try 1", "try 0"]
    assert len(made.http.get("/v1/audit?limit=1").json()["audit"]) == 1
    assert made.http.get("/v1/audit?limit=-1").status_code == 400
    path = Path(made.boot.state_dir) / "audit.jsonl"
    with path.open("ab") as file:
        file.write(b"\xff{broken\n")
        file.write(json.dumps({"reason": "old", "filler": "x" * (8 * 2**20)}).encode() + b"\n")
    made.http.post("/v1/resume", json={"reason": "over the brim"})
    assert not path.exists() and path.with_name("audit.jsonl.1").exists()
    made.http.post("/v1/resume", json={"reason": "fresh"})
    assert [line["reason"] for line in audit(made)][:2] == ["fresh", "over the brim"]


def test_events_are_numbered_streamed_and_resumed(daemon: Trio) -> None:
    made, _, _ = daemon
    known = made.http.get("/v1/events?follow=false").json()
    assert [event["data"]["target"] for event in known["events"] if event["kind"] == "state"][-1] == "ready"
    numbers = [event["seq"] for event in known["events"]]
    assert numbers == sorted(set(numbers)) and known["last"] == numbers[-1]
    with made.http.stream("GET", f"/v1/events?since={known['last']}") as stream:
        lines = stream.iter_lines()
        made.supervisor.died("scheduler-0")
        seen = _events(lines, "recovering")
    process = next(event for event in seen if event["kind"] == "process")
    assert (process["severity"], process["data"]["process"], process["data"]["status"]) == ("error", "scheduler-0", -9)
    assert [event["seq"] for event in seen] == list(range(known["last"] + 1, seen[-1]["seq"] + 1)), "none is missing"
    since = seen[0]["seq"]
    with made.http.stream("GET", "/v1/events", headers={"Last-Event-ID": str(since)}) as stream:
        resumed = _events(stream.iter_lines(), "recovering")
    assert [event["seq"] for event in resumed] == [event["seq"] for event in seen[1:]]
    wait_for(lambda: b"killed by SIGKILL" in made.boot.ports.control_state.read_bytes(), "the events are on disk")
    made.kill_control()
    made.start_control(incarnation=2)
    wait_for(lambda: made.status(), "control answers")
    later = made.http.get(f"/v1/events?follow=false&since={since}").json()
    assert later["events"][0]["seq"] == since + 1, "numbers go on"


def _events(lines: Iterator[str], until: str) -> list[dict[str, Any]]:
    """Events of a stream up to the one that enters state `until`."""
    found = []
    for line in lines:
        if line.startswith("data: "):
            found.append(json.loads(line[6:]))
            if found[-1]["data"].get("target") == until:
                return found
    raise AssertionError("the stream ended")


def test_log_levels_are_set_while_running(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    done = made.http.post("/v1/log-level", json={"level": "debug", "process": "scheduler"})
    assert done.json()["data"] == {"level": "debug", "processes": ["scheduler-0"]}
    everyone = made.http.post("/v1/log-level", json={"level": "warning"}).json()
    assert {f"{r['role']}-{r['rank']}" for r in everyone["results"]} == {"supervisor-0", "control-0", "frontend-0", "detokenizer-0", "scheduler-0"}
    assert made.supervisor.called("configure") == [{"log_level": "warning"}]
    assert made.http.post("/v1/log-level", json={"process": "moon", "level": "info"}).json()["error"]["param"] == "process"
    assert made.http.post("/v1/log-level", json={"level": "loud"}).json()["error"]["param"] == "level"
    made.http.post("/v1/log-level", json={"level": "debug", "process": "scheduler-0"})
    scheduler.link.close()
    made.supervisor.died("scheduler-0")
    made.supervisor.epoch = 2
    fresh = made.worker("scheduler", pid=201, incarnation=2, epoch=2)
    fresh.link.ready(READY_INFO)
    made.wait_state("ready")
    made.http.post("/v1/log-level")
    assert made.supervisor.called("configure")[-1] == {"log_level": "info"}, "without a level: the configured one"


def test_reads_need_no_rank(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    scheduler.link.close()
    frontend.answers = dict.fromkeys(("drain", "abort"))
    for path in ("status", "processes", "kv", "requests", "weights", "config", "operations", "audit", "events?follow=false"):
        assert made.http.get(f"/v1/{path}", timeout=httpx.Timeout(5 * SLOW)).status_code == 200, path
