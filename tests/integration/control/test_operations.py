"""The admin plane over its socket: verbs, conflicts, errors, audit, reload with roll-back."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.plan.spec import Boot
from tests.daemon import SLOW, whole_lines
from tests.integration.control.harness import READY_INFO, FakeWorker, Stage, stage, wait_for

Trio = tuple[Stage, FakeWorker, FakeWorker]


@pytest.fixture
def daemon() -> Iterator[Trio]:
    """A ready daemon, its scheduler and its frontend."""
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        made.start_control()
        scheduler, _, frontend = made.to_ready()
        yield made, scheduler, frontend


def error(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Check the envelope; its inside."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code", "hint", "operation_id"} <= body.keys()
    assert (body["code"], body["param"]) == (code, param), body
    return body


def audit(daemon: Stage) -> list[dict[str, Any]]:
    path = Path(daemon.boot.state_dir) / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_flush_reports_pages_busy_conflict_and_timeout(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = {"pages_freed": 7}
    done = made.http.post("/v1/flush", json={"reason": "nightly"}).json()
    assert (done["state"], done["data"], len(done["results"])) == ("succeeded", {"pages_freed": 7}, 1)
    scheduler.answers["flush"] = ("busy", {"running": 2, "waiting": 1})
    refused = error(made.http.post("/v1/flush"), 409, "busy")
    assert "2 running, 1 waiting" in refused["message"]
    began = time.monotonic()
    error(made.http.post("/v1/flush?timeout_s=1"), 409, "timeout")
    assert 0.9 < time.monotonic() - began < 10 * SLOW
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.http.post, "/v1/flush?timeout_s=600")
        wait_for(lambda: (made.status()["operation"] or {}).get("verb") == "flush", "flush runs")
        error(made.http.post("/v1/flush", json={"timeout_s": 1}), 409, "flush_in_progress")
        scheduler.answers["flush"] = {"pages_freed": 0}
        assert waiting.result().status_code == 200
    first, second, *_ = audit(made)
    assert (first["uid"], first["gid"], first["pid"]) == (os.getuid(), os.getgid(), os.getpid())
    assert (first["verb"], first["reason"], first["result"]) == ("flush", "nightly", "succeeded")
    assert (second["result"], second["code"]) == ("failed", "busy")
    wait_for(lambda: made.metric('llmd_operations_total{verb="flush",result="succeeded"}') == 2, "metric")


def test_flush_waits_for_work_to_end(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    timer = threading.Timer(0.5, lambda: scheduler.answers.update(flush={"pages_freed": 1}))
    timer.start()
    assert made.http.post("/v1/flush?timeout_s=10").status_code == 200
    timer.join()


def test_drain_and_resume(daemon: Trio) -> None:
    made, _, frontend = daemon
    frontend.answers["drain"] = {"inflight": 1}
    assert made.http.post("/v1/drain").json()["state"] == "succeeded"
    assert made.status()["state"] == "draining"
    error(made.http.post("/v1/drain", json={"timeout_s": 0.3}), 409, "timeout")
    frontend.answers["drain"] = {"inflight": 0}
    assert made.http.post("/v1/drain", json={"timeout_s": 5}).status_code == 200
    assert made.http.post("/v1/resume").status_code == 200
    assert made.status()["state"] == "ready"
    assert frontend.verbs()[-1] == "resume"


def test_abort_names_exactly_one_thing_and_asks_the_frontends(daemon: Trio) -> None:
    made, _, frontend = daemon
    for body, param in (({}, "rid"), ({"rid": ""}, "rid"), ({"client_id": ""}, "client_id"), ({"rid": "a", "all": True}, "rid"), ({"rids": "a"}, "rids")):
        error(made.http.post("/v1/abort", json=body), 400, None, param)
    assert "abort" not in frontend.verbs()
    frontend.answers["abort"] = {"aborted": ["r1"]}
    assert made.http.post("/v1/abort", json={"rid": "r1"}).json()["data"] == {"aborted": ["r1"]}
    assert frontend.commands[-1].params == {"rid": "r1", "client_id": "", "everything": False}
    frontend.answers["abort"] = {"aborted": []}
    error(made.http.post("/v1/abort?client_id=x"), 404, "not_found", "client_id")
    assert made.http.post("/v1/abort?all=true").json()["data"] == {"aborted": []}
    assert audit(made)[-1]["verb"] == "abort"


def test_a_drain_outlives_control(daemon: Trio) -> None:
    made, _, frontend = daemon
    made.http.post("/v1/drain")
    made.kill_control()
    made.start_control(incarnation=2)
    made.wait_state("draining")
    assert made.http.post("/v1/resume").status_code == 200
    assert frontend.verbs()[-1] == "resume"


def test_restart_waits_for_the_new_epoch(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/restart")
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        error(made.http.post("/v1/restart"), 409, "busy")
        scheduler.link.close()
        made.supervisor.died("scheduler-0", reason="reload")
        made.supervisor.epoch = 2
        made.worker("scheduler", pid=201, incarnation=2, epoch=2).link.ready(READY_INFO)
        done = answer.result().json()
    assert done["data"] == {"epoch": 2}
    assert [(r["role"], r["rank"], r["ok"]) for r in done["results"]] == [("scheduler", 0, True)]
    assert made.status()["state"] == "ready"


def test_restart_goes_on_when_the_new_engine_dies(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    made.supervisor.answered = {"epoch": 1}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/restart")
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        scheduler.link.close()
        made.supervisor.epoch = 2
        made.supervisor.died("scheduler-0")
        wait_for(lambda: "waits for its next start" in made.status()["stage"], "control knows")
        assert not answer.done()
        made.supervisor.epoch = 3
        made.worker("scheduler", pid=203, incarnation=3, epoch=3).link.ready(READY_INFO)
        done = answer.result().json()
    assert done["state"] == "succeeded"
    assert done["data"] == {"epoch": 3, "died_meanwhile": "scheduler-0 killed by SIGKILL: last words"}
    assert [(r["role"], r["rank"], r["ok"]) for r in done["results"]] == [("scheduler", 0, True)]


def test_restart_that_does_not_come_says_what_each_rank_does(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, f"/v1/restart?timeout_s={SLOW:g}")
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        scheduler.link.close()
        made.supervisor.epoch = 2
        made.supervisor.died("scheduler-0")
        body = answer.result()
    said = error(body, 409, "timeout")
    assert f"within {SLOW:g} s" in said["message"] and "llmctl status" in said["hint"]
    assert [(r["answered"], r["ok"], r["message"]) for r in body.json()["operation"]["results"]] == [
        (False, False, "waits for its next start (killed by SIGKILL)")
    ]


def test_stop_sends_the_supervisor_its_signal(daemon: Trio) -> None:
    made, _, _ = daemon
    error(made.http.post("/v1/stop"), 503, "engine_unavailable")  # the pid it reports is not control's parent
    got = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: got.set())
    try:
        made.supervisor.pid = os.getpid()
        wait_for(lambda: made.status()["processes"][0]["pid"] == os.getpid(), "snapshot")
        assert made.http.post("/v1/stop").status_code == 200
        wait_for(got.is_set, "SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)


def new_engine(made: Stage, old: FakeWorker, epoch: int) -> FakeWorker:
    old.link.close()
    made.supervisor.died("scheduler-0", reason="reload")
    made.supervisor.epoch = epoch
    fresh = made.worker("scheduler", pid=200 + epoch, incarnation=epoch, epoch=epoch)
    fresh.link.ready(READY_INFO)
    return fresh


def test_reload_drains_commits_and_shows_the_version(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    prime(made)
    frontend.answers["drain"] = {"inflight": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/reload", json={"path": "dummy", "version": "v2"})
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        assert made.status()["state"] == "reloading"
        error(made.http.post("/v1/flush"), 409, "reload_in_progress")
        error(made.http.post("/v1/reload", json={"path": "dummy"}), 409, "reload_in_progress")
        assert Boot.load(made.boot.ports.boot.read_bytes()).files.weights_version == "v2"
        new_engine(made, scheduler, 2)
        assert answer.result().json()["data"] == {"weights_version": "v2", "epoch": 2}
    status = made.status()
    assert (status["state"], status["weights_version"]) == ("ready", "v2")
    assert frontend.verbs()[-1] == "resume"
    wait_for(lambda: made.metric('llmd_weights_info{version="v2"}') == 1, "metric")


def test_reload_rolls_back_when_the_new_engine_fails(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    prime(made)
    before = made.boot.ports.boot.read_bytes()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/reload", json={"path": "dummy", "version": "v2", "mode": "now"})
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        scheduler.link.close()
        made.supervisor.epoch = 2
        made.supervisor.died("scheduler-0", status=78, reason="exit")
        wait_for(lambda: len(made.supervisor.called("restartEngine")) == 2, "restart of the old")
        assert made.boot.ports.boot.read_bytes() == before
        made.supervisor.epoch = 3
        made.supervisor.processes["scheduler-0"]["last_exit"]["age_s"] = 100.0
        made.worker("scheduler", pid=203, incarnation=3, epoch=3).link.ready(READY_INFO)
        body = answer.result()
    error(body, 500, "internal_error")
    operation = body.json()["operation"]
    assert operation["state"] == "rolled_back"
    assert "exited with status 78" in operation["message"]
    assert made.http.get(f"/v1/operations/{operation['id']}").json()["state"] == "rolled_back"
    assert made.wait_state("ready")["weights_version"] == made.boot.files.weights_version
    assert frontend.verbs()[-1] == "freeze"


def test_a_replaced_control_finishes_the_reload(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    prime(made)
    frontend.answers["drain"] = {"inflight": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/reload", json={"path": "dummy", "version": "v2"})
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        made.kill_control()
        with pytest.raises(httpx.TransportError):
            answer.result()
    new_engine(made, scheduler, 2)
    made.start_control(incarnation=2)
    assert made.wait_state("ready")["weights_version"] == "v2"
    wait_for(lambda: frontend.verbs()[-1] == "resume", "resume")
    wait_for(lambda: [o["state"] for o in made.http.get("/v1/operations").json()["operations"]] == ["succeeded"], "operation")


def test_reload_that_cannot_drain_in_time_leaves_everything(daemon: Trio) -> None:
    made, _, frontend = daemon
    prime(made)
    frontend.answers["drain"] = {"inflight": 1}
    error(made.http.post("/v1/reload", json={"path": "dummy", "timeout_s": 0.3}), 409, "timeout")
    assert made.supervisor.called("restartEngine") == []
    assert made.wait_state("ready")["weights_version"] == made.boot.files.weights_version
    assert frontend.verbs()[-1] == "resume"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, None, "path"),
        ({"path": None}, 400, None, "path"),
        ({"path": "relative"}, 400, None, "path"),
        ({"path": "/etc/passwd"}, 403, "forbidden", "path"),
        ({"path": "/" + "a" * 300}, 400, None, "path"),
        ({"path": "/a\0b"}, 400, None, "path"),
        ({"path": "dummy", "mode": "later"}, 400, None, "mode"),
        ({"path": "dummy", "version": ""}, 400, None, "version"),
        ({"path": "dummy", "colour": 1}, 400, None, "colour"),
        ({"path": "dummy", "timeout_s": "soon"}, 400, None, "timeout_s"),
    ],
)
def test_reload_refuses_by_name(daemon: Trio, body: dict[str, Any], status: int, code: str | None, param: str) -> None:
    made, _, _ = daemon
    error(made.http.post("/v1/reload", json=body), status, code, param)
    assert made.status()["state"] == "ready"
    assert [(line["verb"], line["code"]) for line in audit(made)] == [("reload", code)]


def test_links_in_a_circle_are_a_bad_path(daemon: Trio) -> None:
    made, _, _ = daemon
    cache = Path(made.boot.cache_dir)
    cache.mkdir(exist_ok=True)
    (cache / "a").symlink_to(cache / "b")
    (cache / "b").symlink_to(cache / "a")
    error(made.http.post("/v1/reload", json={"path": str(cache / "a")}), 400, None, "path")


def test_a_disk_that_refuses_is_named_audited_and_survived(daemon: Trio) -> None:
    made, _, _ = daemon
    prime(made)
    blocks = [made.boot.ports.boot.with_name(made.boot.ports.boot.name + ".new"), made.boot.ports.control_state.with_name("control.state.new")]
    for path in blocks:
        path.unlink(missing_ok=True)
        path.mkdir()
    said = error(made.http.post("/v1/reload", json={"path": "dummy", "mode": "now"}), 500, "internal_error")
    assert "cannot write" in said["message"]
    assert str(made.boot.ports.private) in said["message"]
    assert said["operation_id"].startswith("op-")
    assert made.status()["state"] == "ready"
    wait_for(lambda: "cannot be written" in made.log.read_text(), "the state is not written either")
    time.sleep(1.0)  # many heartbeats
    lines = [json.loads(line) for line in whole_lines(made.log)]
    assert not [line for line in lines if "traceback" in line]
    assert len([line for line in lines if line["level"] == "warning" and "cannot be written" in line["msg"]]) == 1
    for path in blocks:
        path.rmdir()
    wait_for(lambda: "is written again" in made.log.read_text(), "the state is written again")
    assert [(line["verb"], line["result"], line["code"], line["operation_id"]) for line in audit(made)] == [
        ("reload", "failed", "internal_error", said["operation_id"])
    ]


def test_a_waiting_flush_ends_with_its_caller_and_for_a_restart(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    transport = httpx.HTTPTransport(uds=str(made.boot.ports.admin_socket))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=0.5) as other, pytest.raises(httpx.TimeoutException):
        other.post("/v1/flush?timeout_s=600")
    ended = [("flush", "failed", "aborted")]
    wait_for(lambda: [(line["verb"], line["result"], line["code"]) for line in audit(made)] == ended, "the flush has ended")
    with ThreadPoolExecutor(2) as pool:
        flush = pool.submit(made.http.post, "/v1/flush?timeout_s=600")
        wait_for(lambda: (made.status()["operation"] or {}).get("verb") == "flush", "flush runs")
        restart = pool.submit(made.http.post, "/v1/restart")
        assert "restart" in error(flush.result(), 409, "aborted")["message"]
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")  # until then a new engine would be the old one
        new_engine(made, scheduler, 2)
        assert restart.result().status_code == 200


@pytest.mark.parametrize(("stopping", "status", "code"), [(True, 503, "shutting_down"), (False, 409, "aborted")])
def test_whoever_waits_is_told_that_control_ends(daemon: Trio, stopping: bool, status: int, code: str) -> None:
    """Be it with llmd or alone. A reader of events has a whole answer."""
    made, scheduler, _ = daemon
    scheduler.answers["flush"] = ("busy", {"running": 1, "waiting": 0})
    with ThreadPoolExecutor(1) as pool, made.http.stream("GET", "/v1/events") as events:
        flush = pool.submit(lambda: made.http.post("/v1/flush", json={"timeout_s": 300}))
        wait_for(lambda: "flush" in scheduler.verbs(), "it waits")
        if stopping:
            made.supervisor.stopping = True
            wait_for(lambda: made.supervisor.called("shutdown"), "control has seen to it")
        assert made.control is not None
        made.control.send_signal(signal.SIGTERM)
        refused = error(flush.result(), status, code)
        assert made.control.wait(20 * SLOW) == 0
        assert "flush: failed" in events.read().decode()
    assert refused["message"] == ("llmd is being stopped: this was not finished" if stopping else "control ends")
    assert "raceback" not in made.log.read_text()
    assert [(line["verb"], line["result"], line["code"]) for line in audit(made)] == [("flush", "failed", code)]


def test_an_answer_that_does_not_come_leaves_the_outcome_open(daemon: Trio) -> None:
    made, _, _ = daemon
    made.supervisor.deaf = True
    said = error(made.http.post("/v1/restart"), 503, "engine_unavailable")
    made.supervisor.deaf = False
    assert "not known" in said["message"]
    assert made.http.get(f"/v1/operations/{said['operation_id']}").json()["outcome"] == "unknown"
    assert made.supervisor.called("restartEngine")[0]["until"] < time.monotonic() + 3


def test_reload_with_abort_ends_what_runs_by_that_name(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    prime(made)
    frontend.answers["drain"] = {"inflight": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.http.post, "/v1/reload", json={"path": "dummy", "version": "v2", "mode": "abort"})
        wait_for(lambda: made.supervisor.called("restartEngine"), "restart")
        assert [c.params for c in frontend.commands if c.verb == "abort"] == [{"everything": True, "code": "reloaded"}]
        new_engine(made, scheduler, 2)
        assert answer.result().status_code == 200


def test_reload_of_a_missing_path_and_of_other_shapes(daemon: Trio) -> None:
    made, _, _ = daemon
    cache = Path(made.boot.cache_dir)
    cache.mkdir(exist_ok=True)
    error(made.http.post("/v1/reload", json={"path": str(cache / "none")}), 404, "not_found", "path")
    empty = cache / "empty"
    empty.mkdir()
    error(made.http.post("/v1/reload", json={"path": str(empty)}), 400, None, "path")
    # The running model's facts in this test are not those of the checked one.
    body = error(made.http.post("/v1/reload", json={"path": "dummy"}), 409, "incompatible_weights", "path")
    assert "context_length" in body["message"]


def test_operations_by_their_general_form(daemon: Trio) -> None:
    made, _, _ = daemon
    done = made.http.post("/v1/operations", json={"verb": "flush", "params": {"timeout_s": 1}, "reason": "why not"})
    assert (done.json()["state"], done.json()["reason"]) == ("succeeded", "why not")
    error(made.http.post("/v1/operations", json={"verb": "dance"}), 400, None, "verb")
    error(made.http.post("/v1/operations", json={"verb": "restart", "target": "moon"}), 400, None, "target")
    error(made.http.post("/v1/operations", json={"verb": "flush", "force": True}), 400, None, "force")
    assert made.http.get("/v1/weights").json()["weights_version"] == made.boot.files.weights_version


def test_every_answer_has_the_envelope_and_browsers_are_refused(daemon: Trio) -> None:
    made, _, _ = daemon
    error(made.http.get("/v1/nowhere"), 404, "not_found")
    error(made.http.delete("/v1/status"), 405, "method_not_allowed")
    error(made.http.get("/v1/operations/op-none"), 404, "not_found")
    error(made.http.post("/v1/flush", content=b"{"), 400, "invalid_json")
    error(made.http.post("/v1/flush", content=b"[" * 100_000), 400, "invalid_json")
    error(made.http.post("/v1/flush", content=b" " * (2**20 + 1)), 413, "request_too_large")
    error(made.http.post("/v1/flush?timeout_s=nan"), 400, None, "timeout_s")
    for header in ("Origin", "Referer", "Sec-Fetch-Site"):
        error(made.http.get("/v1/status", headers={header: "http://localhost"}), 403, "forbidden")


def test_the_socket_is_for_its_owner_alone_without_a_group(daemon: Trio) -> None:
    made, _, _ = daemon
    mode = made.boot.ports.admin_socket.lstat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def prime(made: Stage) -> None:
    """Have control run with the facts that the check of `dummy` finds."""
    files = check_dummy(made)
    made.kill_control()
    object.__setattr__(made, "boot", replace_files(made.boot, files))
    made.boot.ports.boot.write_bytes(made.boot.dump())
    made.start_control(incarnation=2)
    made.wait_state("ready")


def check_dummy(made: Stage) -> Any:
    import subprocess
    import sys

    import msgspec

    from llmd.plan.spec import ModelFiles

    request = msgspec.json.encode({"args": made.boot.args, "cache_dir": made.boot.cache_dir})
    done = subprocess.run([sys.executable, "-m", "llmd.store.check"], input=request, capture_output=True, check=True, timeout=30 * SLOW)
    return msgspec.json.decode(done.stdout, type=ModelFiles)


def replace_files(boot: Boot, files: Any) -> Boot:
    import msgspec

    return msgspec.structs.replace(boot, files=files)
