"""Requests outlive the engine and the detokenizer: while llmd stops, drains, is idle, and when nobody comes back in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import HANGS, SLOW, Brake, Daemon, gone, wait_for


def config(**supervision: Any) -> dict[str, Any]:
    fast = {"hang_timeout": HANGS, "helper_timeout": HANGS, "control_timeout": HANGS, "restart": {"max": 1000}}
    return {"model": {"path": "dummy"}, "supervision": fast | supervision, "http": {"port": 0, "drain_timeout": "300s"}}


class Streams:
    """`count` streams in the background, each of the prompt's characters over and over."""

    def __init__(self, daemon: Daemon, count: int, tokens: int, **fields: Any) -> None:
        self.texts: dict[int, str] = {}
        self.errors: dict[int, dict[str, Any]] = {}
        self._daemon, self._tokens, self._fields = daemon, tokens, fields
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()
        wait_for("all streams run", lambda: len(self.texts) == count, 60)

    def _run(self, number: int) -> None:
        for event in self._daemon.stream(f"stream {number:02} ", max_tokens=self._tokens, ignore_eos=True, **self._fields):
            if "error" in event:
                self.errors[number] = event["error"]
            else:
                self.texts[number] = self.texts.get(number, "") + event["choices"][0]["text"]

    def check(self, timeout: float = 60) -> None:
        for thread in self._threads:
            thread.join(timeout * SLOW)
            assert not thread.is_alive(), "a stream hangs"
        assert self.errors == {}
        assert self.texts == {number: (f"stream {number:02} " * self._tokens)[: self._tokens] for number in range(len(self._threads))}


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "control"])
def test_what_dies_while_llmd_stops_comes_back_for_the_requests_in_flight(tmp_path: Path, role: str) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config(), failpoints=brake.steps).start() as daemon:
        streams = Streams(daemon, 5, 300)
        assert daemon.process is not None
        pid = daemon.pid(role)
        daemon.process.send_signal(signal.SIGTERM)
        wait_for("it drains", lambda: daemon.status_code("/readyz") == 503, 60)
        os.kill(pid, signal.SIGKILL)
        brake.release()
        streams.check()
        assert daemon.wait_exit(20) == 0


def test_a_drain_that_an_operator_asked_for_outlives_everything(tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config(), failpoints=brake.steps).start() as daemon:
        streams = Streams(daemon, 3, 400)
        before = daemon.metric("llmd_requests_total")
        assert daemon.admin("POST", "/v1/drain").status_code == 200
        for role in ("control", "scheduler", "detokenizer"):
            pid = daemon.pid(role)
            os.kill(pid, signal.SIGKILL)
            wait_for(f"a new {role}", lambda pid=pid, role=role: (c := daemon.child(role)) and c.pid != pid, 60)
        brake.release()
        streams.check()
        wait_for("control is back", lambda: daemon.status()["state"] == "draining", 60)
        refused = daemon.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert daemon.admin("POST", "/v1/resume").status_code == 200
        wait_for("an answer", lambda: daemon.complete().status_code == 200, 60)
        wait_for("no counter went down", lambda: daemon.metric("llmd_requests_total") >= before + 3, 60)
        assert daemon.stop() == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nobody_notices_a_lost_control(tmp_path: Path, signum: signal.Signals) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config(), failpoints=brake.steps).start() as daemon:
        streams = Streams(daemon, 4, 200)
        pid = daemon.pid("control")
        os.kill(pid, signum)
        assert daemon.text() == "hellohel"
        assert daemon.status_code("/readyz") == 200 and daemon.status_code("/metrics") == 200
        brake.release()
        streams.check()
        wait_for("a new control", lambda: (c := daemon.child("control")) and c.pid != pid and gone([pid]), 60)
        wait_for("it knows", lambda: daemon.status()["state"] == "ready", 60)
        assert daemon.stop() == 0


def test_engine_and_control_lost_together(tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config(), failpoints=brake.steps).start() as daemon:
        streams = Streams(daemon, 4, 200)
        for role in ("scheduler", "detokenizer", "control"):
            os.kill(daemon.pid(role), signal.SIGKILL)
        brake.release()
        streams.check()
        wait_for("the recovery is counted", lambda: daemon.metric("llmd_requests_recovered_total") >= 4, 60)
        assert daemon.stop() == 0


def test_what_takes_too_long_is_told_so_and_never_hangs(tmp_path: Path) -> None:
    steps, load = Brake(tmp_path), Brake(tmp_path, "load", on=False)
    slow = f"{steps.steps};{load.holds('scheduler.weights')}"
    with Daemon(tmp_path, config=config(hold_timeout="1s", recover_timeout="2s"), failpoints=slow).start() as daemon:
        streams = Streams(daemon, 2, 2000)
        load.put_on()
        os.kill(daemon.pid("scheduler"), signal.SIGKILL)
        wait_for("readyz is 503", lambda: daemon.status_code("/readyz") == 503, 60)
        began = time.monotonic()
        held = daemon.complete()
        assert held.status_code == 503 and held.json()["error"]["code"] == "engine_unavailable" and int(held.headers["retry-after"]) > 0
        assert time.monotonic() - began >= 1
        wait_for("both streams are told", lambda: len(streams.errors) == 2, 60)
        assert {error["code"] for error in streams.errors.values()} == {"engine_unavailable"}
        load.release()
        steps.release()
        daemon.wait_ready(30)
        assert daemon.text() == "hellohel"
        assert daemon.stop() == 0


def test_a_client_that_leaves_during_recovery_leaves_nothing_behind(tmp_path: Path) -> None:
    steps, load = Brake(tmp_path), Brake(tmp_path, "load", on=False)
    with Daemon(tmp_path, config=config(), failpoints=f"{steps.steps};{load.holds('scheduler.weights')}").start() as daemon:
        with httpx.stream("POST", daemon.url + "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}) as answer:
            lines = answer.iter_lines()  # let go, it would close the stream
            next(lines)
            load.put_on()
            os.kill(daemon.pid("scheduler"), signal.SIGKILL)
            wait_for("readyz is 503", lambda: daemon.status_code("/readyz") == 503, 60)
        load.release()
        daemon.wait_ready(30)
        wait_for("nothing runs", lambda: daemon.requests() == (0, 0) and daemon.in_flight() == 0, 60)
        assert daemon.status()["kv"]["pages_active"] == 0
        assert daemon.stop() == 0
