"""Control's way through a daemon's life: start, engine death, replacement of control, stop."""

from __future__ import annotations

import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.wire import sockets
from llmd.wire.codec import encode
from llmd.wire.messages import Heartbeat
from tests.daemon import SLOW
from tests.integration.control.harness import READY_INFO, Stage, stage, wait_for


@pytest.fixture
def daemon() -> Iterator[Stage]:
    # A short path: socket paths end at 107 bytes.
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        yield made


def test_start_waits_for_all_then_warms_up_and_is_ready(daemon: Stage) -> None:
    daemon.start_control()
    scheduler = daemon.worker("scheduler", pid=101)
    scheduler.link.progress("loading weights", 1, 4)
    wait_for(lambda: daemon.status().get("stage") == "scheduler-0: loading weights", "stage")
    assert daemon.status()["state"] == "loading"
    assert daemon.status()["progress"] == 0.25
    detokenizer, frontend = daemon.worker("detokenizer", pid=102), daemon.worker("frontend", pid=103)
    scheduler.link.ready(READY_INFO)
    detokenizer.link.ready()
    frontend.answers["warmup"] = None
    frontend.link.ready()
    daemon.wait_state("warming")
    assert not daemon.supervisor.reports[-1]["ready"]
    warmup = wait_for(lambda: [c for c in frontend.commands if c.verb == "warmup"], "warmup")[0]
    frontend.link.reply(warmup)
    status = daemon.wait_state("ready")
    assert [w.verbs() for w in (scheduler, detokenizer)] == [["freeze"], ["freeze"]]
    assert frontend.verbs() == ["warmup", "freeze"]
    assert status["kv"]["pages_total"] == 100
    assert {p["role"] for p in status["processes"]} == {"supervisor", "control", "scheduler", "detokenizer", "frontend"}
    wait_for(lambda: daemon.supervisor.reports[-1]["ready"] and daemon.supervisor.reports[-1]["state"] == "ready", "report")
    published = wait_for(lambda: frontend.last if frontend.last and frontend.last.state == "ready" else None, "publication")
    assert published.engine_up
    assert published.detokenizer_incarnation == 1
    assert published.model == READY_INFO
    assert re.search(r"loading -> warming: all processes ready \d+\.\d s after control began", daemon.log.read_text())


def test_nobody_is_told_that_it_is_ready_before_the_supervisor_knows_that_all_is_up(daemon: Stage) -> None:
    """Else a process that dies at once, or a stop, would end a start that is over."""
    daemon.start_control()
    workers = daemon.worker("scheduler", pid=101), daemon.worker("detokenizer", pid=102), daemon.worker("frontend", pid=103)
    frontend = workers[2]
    frontend.answers["warmup"] = None
    for worker in workers:
        worker.link.ready(READY_INFO if worker is workers[0] else {})
    warmup = wait_for(lambda: [c for c in frontend.commands if c.verb == "warmup"], "warmup")[0]
    assert not any(report["up"] or report["ready"] for report in daemon.supervisor.reports)
    daemon.supervisor.mute = True  # and so is what it hears at this moment from before
    frontend.link.reply(warmup)
    wait_for(lambda: any(report["up"] for report in daemon.supervisor.reports), "it is told")
    first = next(report for report in daemon.supervisor.reports if report["up"])
    assert (first["state"], first["ready"]) == ("warming", False)
    assert daemon.status()["state"] == "warming" and not any(picture.state == "ready" for picture in frontend.published)
    daemon.supervisor.mute = False
    daemon.wait_state("ready")
    wait_for(lambda: daemon.supervisor.reports[-1]["ready"], "report")


def test_a_dead_engine_is_recovering_until_its_next_epoch_is_ready(daemon: Stage) -> None:
    daemon.start_control()
    scheduler, _, frontend = daemon.to_ready()
    scheduler.meter.inc("llmd_requests_retracted_total", 3)
    scheduler.meter.set("llmd_requests_running", 5)
    wait_for(lambda: daemon.metric("llmd_requests_running") == 5, "gauge")
    scheduler.link.close()
    daemon.supervisor.died("scheduler-0")
    status = daemon.wait_state("recovering")
    assert "scheduler-0 killed by SIGKILL" in status["reason"]
    wait_for(lambda: frontend.last and not frontend.last.engine_up, "publication")
    wait_for(lambda: daemon.metric("llmd_requests_running") == 0, "gauge of the dead")
    daemon.supervisor.epoch = 2
    again = daemon.worker("scheduler", pid=201, incarnation=2, epoch=2)
    again.meter.inc("llmd_requests_retracted_total", 1)
    again.link.ready(READY_INFO)
    assert daemon.wait_state("ready")["epoch"] == 2
    assert "warmup" not in frontend.verbs()[2:]
    wait_for(lambda: daemon.metric("llmd_requests_retracted_total") == 4, "counter")
    wait_for(lambda: daemon.metric('llmd_process_restarts_total{role="scheduler",reason="signal"}') == 1, "the supervisor's word")
    assert "recovering: scheduler-0 killed by SIGKILL" in daemon.log.read_text()


def test_without_a_detokenizer_it_recovers_and_a_dead_frontend_is_told_to_the_scheduler(daemon: Stage) -> None:
    daemon.start_control()
    scheduler, detokenizer, frontend = daemon.to_ready()
    detokenizer.link.close()
    daemon.supervisor.died("detokenizer-0")
    wait_for(lambda: frontend.last and frontend.last.detokenizer_incarnation == 0, "publication")
    status = daemon.status()
    assert (status["state"], status["degraded"]) == ("recovering", ["detokenizer-0 is away"])
    assert "detokenizer-0" in status["reason"]
    frontend.link.close()
    daemon.supervisor.died("frontend-0")
    gone = wait_for(lambda: [c for c in scheduler.commands if c.verb == "frontend_gone"], "frontend_gone")
    assert gone[0].params["frontend"] == 0
    daemon.worker("detokenizer", pid=301, incarnation=2).link.ready()
    status = wait_for(lambda: (now := daemon.status())["degraded"] == ["frontend-0 is away"] and now, "the detokenizer is back")
    assert status["state"] == "recovering", "nobody answers"
    daemon.worker("frontend", pid=302, incarnation=2).link.ready()
    daemon.wait_state("ready")


def test_a_hung_scheduler_is_killed_and_named() -> None:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory), hang_timeout=SLOW) as daemon:
        daemon.start_control()
        scheduler, _, _ = daemon.to_ready()
        scheduler.pulse.begin()
        call = wait_for(lambda: daemon.supervisor.called("kill"), "kill")[0]
        assert call == {"name": "scheduler-0", "pid": 101, "reason": "hang", "why": call["why"], "until": call["until"]}
        assert call["why"].startswith("in one step (busy) for ")
        wait_for(lambda: daemon.metric('llmd_watchdog_kills_total{role="scheduler"}') == 1, "metric")


def test_stop_drains_the_frontends_and_then_shuts_down(daemon: Stage) -> None:
    daemon.start_control()
    _, _, frontend = daemon.to_ready()
    frontend.answers["drain"] = {"inflight": 1}
    daemon.supervisor.drain_left_s = 30.0
    daemon.supervisor.stopping = True
    daemon.wait_state("draining")
    wait_for(lambda: frontend.verbs().count("drain") >= 2, "drain")
    assert daemon.supervisor.called("shutdown") == []
    frontend.answers["drain"] = {"inflight": 0}
    call = wait_for(lambda: daemon.supervisor.called("shutdown"), "shutdown")[0]
    assert call["status"] == 0
    assert "shutting_down" not in frontend.verbs()
    assert daemon.kill_control(signal.SIGTERM) == 0


def test_a_drain_that_takes_too_long_ends_with_shutting_down(daemon: Stage) -> None:
    daemon.start_control()
    _, _, frontend = daemon.to_ready()
    frontend.answers["drain"] = {}
    frontend.meter.set("llmd_frontend_inflight", 2)
    daemon.supervisor.stopping = True
    wait_for(lambda: daemon.supervisor.called("shutdown"), "shutdown")
    assert frontend.verbs()[-1] == "shutting_down"


def test_a_replaced_control_goes_on_without_a_word_of_not_ready(daemon: Stage) -> None:
    daemon.start_control()
    scheduler, _, frontend = daemon.to_ready()
    frontend.meter.inc("llmd_generation_tokens_total", 100)
    wait_for(lambda: daemon.metric("llmd_generation_tokens_total") == 100, "counter")
    cpu = daemon.metric('llmd_process_cpu_seconds_total{role="control",rank="0"}') or 0.0
    daemon.kill_control()
    frontend.meter.inc("llmd_generation_tokens_total", 11)
    seen = len(frontend.published)
    daemon.start_control(incarnation=2)
    daemon.wait_state("ready")
    wait_for(lambda: daemon.metric("llmd_generation_tokens_total") == 111, "counter continues")
    wait_for(lambda: len(frontend.published) > seen, "publication")
    assert {(p.state, p.engine_up) for p in frontend.published[seen:]} == {("ready", True)}
    assert (daemon.metric('llmd_process_cpu_seconds_total{role="control",rank="0"}') or 0.0) >= cpu
    assert "warmup" not in frontend.verbs()[2:]
    assert scheduler.verbs().count("freeze") == 1


def test_a_bad_frame_is_counted_and_named_once(daemon: Stage) -> None:
    import zmq

    daemon.start_control()
    daemon.to_ready()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"stranger")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(daemon.boot.ports.control)
        for _ in range(3):
            socket.send(b"\xc1nonsense")
        wait_for(lambda: daemon.metric('llmd_wire_bad_frames_total{channel="control"}') == 3, "counter")
    assert daemon.log.read_text().count("stranger") == 1
    assert daemon.status()["state"] == "ready"


def test_a_datagram_is_a_message_like_any_other(daemon: Stage) -> None:
    daemon.start_control()
    scheduler, _, _ = daemon.to_ready()
    outlet = sockets.SideOutlet(daemon.boot.ports.control, b"scheduler-0.1")
    nobody = sockets.SideOutlet(daemon.boot.ports.control, b"stranger")
    heartbeat = Heartbeat(phase="at work", step_age_s=0.0, steps=4711, rss_bytes=1, cpu_s=0.0)
    scheduler.link.close()

    def steps() -> int:
        return int(next(row["steps"] for row in daemon.status()["processes"] if row["role"] == "scheduler"))

    assert outlet.send(encode(heartbeat))
    wait_for(lambda: steps() == 4711, "it is taken in")
    for _ in range(3):
        assert nobody.send(b"\xc1nonsense") and nobody.send(encode(heartbeat))
    wait_for(lambda: daemon.metric('llmd_wire_bad_frames_total{channel="control"}') == 3, "counter")
    for each in (outlet, nobody):
        each.close()


def test_events_are_acknowledged_and_bring_a_report_at_once(daemon: Stage) -> None:
    control = daemon.start_control()
    daemon.to_ready()
    assert control.stdin is not None
    assert control.stdout is not None

    words = control.stdout.fileno()

    def read(size: int) -> bytes:
        assert select.select([words], [], [], 10 * SLOW)[0], "no word on the event protocol"
        return os.read(words, size)

    assert read(100) == b"READY\n"
    body = b"processname:scheduler-0"
    control.stdin.write(b"ver:3.0 server:llmd serial:1 pool:control eventname:PROCESS_STATE_EXITED len:%d\n" % len(body) + body)
    control.stdin.flush()
    answer = b""
    while answer != b"RESULT 2\nOKREADY\n":
        answer += read(100)


def test_what_control_missed_while_it_stood_still_is_nobodys_fault() -> None:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory), hang_timeout=SLOW, helper_timeout=SLOW) as daemon:
        control = daemon.start_control()
        daemon.to_ready()
        control.send_signal(signal.SIGSTOP)
        time.sleep(2.5 * SLOW)  # longer than any limit: the passing of time is what is tested
        reports = len(daemon.supervisor.reports)
        control.send_signal(signal.SIGCONT)
        wait_for(lambda: len(daemon.supervisor.reports) > reports + 5, "reports go on")
        assert daemon.supervisor.called("kill") == []
        assert daemon.status()["state"] == "ready"


def test_memory_stays_small(daemon: Stage) -> None:
    daemon.start_control()
    daemon.to_ready()
    own = next(p for p in daemon.status()["processes"] if p["role"] == "control")
    assert own["rss_bytes"] < 150e6


def test_requests_that_wait_while_memory_is_free_and_nothing_runs_end_readiness() -> None:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory), stall_alarm=0.6) as made:
        made.start_control()
        scheduler, _, frontend = made.to_ready()
        scheduler.meter.set("llmd_requests_waiting", 3)
        scheduler.meter.set("llmd_requests_running", 0)
        scheduler.meter.set("llmd_kv_pages", 0, state="free")
        scheduler.meter.set("llmd_kv_pages", 7, state="cached")
        scheduler.meter.set("llmd_kv_pages", 93, state="active")
        wait_for(lambda: frontend.last is not None and frontend.last.stalled, "the alarm")
        assert made.log.read_text().count("the engine is stalled: 3 requests wait") == 1
        assert "cached 7, active 93; scheduler-0 idle" in made.log.read_text()
        scheduler.meter.set("llmd_requests_running", 1)
        wait_for(lambda: frontend.last is not None and not frontend.last.stalled, "the alarm's end")


def test_a_frontend_that_died_while_control_was_away_is_told_to_the_scheduler_too(daemon: Stage) -> None:
    daemon.start_control()
    scheduler, _, frontend = daemon.to_ready()
    daemon.kill_control()
    frontend.link.close()
    daemon.worker("frontend", pid=302, incarnation=2).link.ready()
    daemon.start_control(incarnation=2)
    gone = wait_for(lambda: [c for c in scheduler.commands if c.verb == "frontend_gone"], "frontend_gone")
    assert all(c.params == {"frontend": 0, "incarnation": 1} for c in gone), "never the successor's requests"
