"""Stop beats restart; exit statuses tell the truth."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.daemon import SLOW, Brake, Daemon, gone, least, wait_for

DUMMY = {"model": {"path": "dummy"}}


def stop_and_kill(directory: Path) -> None:
    with Daemon(directory, config=DUMMY, failpoints="").start() as daemon:
        assert daemon.process is not None
        pids = [p.pid for p in daemon.children()]
        scheduler = daemon.pid("scheduler")
        daemon.process.send_signal(signal.SIGTERM)
        os.kill(scheduler, signal.SIGKILL)
        seen: set[int] = set()
        deadline = time.monotonic() + 15 * SLOW
        while daemon.process.poll() is None and time.monotonic() < deadline:
            seen |= {p.pid for p in daemon.children()}
        assert daemon.wait_exit(1) == 0
        assert seen <= set(pids), "no process came back after the stop began"
        assert gone(pids)


def test_a_stop_and_a_crash_in_the_same_instant(tmp_path: Path) -> None:
    for _ in range(4):
        stop_and_kill(tmp_path)


@pytest.mark.soak
def test_fifty_stops_and_crashes_in_the_same_instant(tmp_path: Path) -> None:
    for _ in range(50):
        stop_and_kill(tmp_path)


def test_a_stop_cuts_a_back_off_short(tmp_path: Path) -> None:
    config = DUMMY | {"supervision": {"restart": {"max": 100, "backoff": ["600s", "600s", "600s"]}}}
    with Daemon(tmp_path, config=config, failpoints="").start() as daemon:
        os.kill(daemon.pid("scheduler"), signal.SIGKILL)
        wait_for("the scheduler waits", lambda: daemon.child("scheduler") is None, 5)
        assert daemon.stop() == 0


@pytest.mark.parametrize("role", ["scheduler", "frontend"])
def test_without_a_budget_a_dead_child_ends_llmd_with_70(tmp_path: Path, role: str) -> None:
    with Daemon(tmp_path, config=DUMMY | {"supervision": {"restart": {"max": 0}}}, failpoints="").start() as daemon:
        pids = [p.pid for p in daemon.children()]
        os.kill(daemon.pid(role), signal.SIGKILL)
        assert daemon.wait_exit(10) == 70
        assert gone(pids)
        assert f"{role}" in daemon.log_text().splitlines()[-1] and "SIGKILL" in daemon.log_text().splitlines()[-1]


def test_readiness_comes_after_the_warm_up(tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=DUMMY, failpoints=brake.holds("scheduler.start")).start(ready=False) as daemon:
        wait_for("livez is 200", lambda: daemon.status_code("/livez") == 200, 20)
        ready = httpx.get(daemon.url + "/readyz", timeout=20 * SLOW)
        assert ready.status_code == 503 and ready.json()["status"] in ("starting", "loading") and "stage" in ready.json()
        chat = daemon.chat()
        assert chat.status_code == 503 and chat.json()["error"]["code"] == "loading" and int(chat.headers["retry-after"]) > 0
        assert daemon.status_code("/v1/models") == 200
        brake.release()
        daemon.wait_ready()
        assert daemon.stop() == 0
    assert least(lambda: more_than_others(tmp_path), 0.1 * SLOW) <= 0.1 * SLOW


def more_than_others(directory: Path) -> float:
    """Seconds that the first answer takes beyond twice those of the tenth."""
    with Daemon(directory, config=DUMMY, failpoints="").start() as daemon:
        times = []
        for _ in range(10):
            started = time.monotonic()
            assert daemon.chat().status_code == 200
            times.append(time.monotonic() - started)
        assert daemon.stop() == 0
        return times[0] - 2 * times[9]


def test_a_busy_port_is_found_before_any_weight_is_read(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    os.mkfifo(weights)  # whoever opens it hangs
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        daemon = Daemon(tmp_path, config={"model": {"path": str(weights)}, "http": {"port": port}})
        started = time.monotonic()
        with daemon, pytest.raises(AssertionError, match="llmd ended with 71"):
            daemon.start()
        assert time.monotonic() - started < 10 * SLOW
        assert f"127.0.0.1:{port}" in daemon.log_text()


def test_a_drain_lets_what_has_come_finish_and_refuses_what_comes(tmp_path: Path) -> None:
    """Streams, whole answers, and those that wait for a place; on connections that are there, and on new ones."""
    config = DUMMY | {"http": {"port": 0, "drain_timeout": "300s"}, "memory": {"max_running_requests": 6}}
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config, failpoints=brake.steps).start() as daemon, httpx.Client(base_url=daemon.url, timeout=10 * SLOW) as known:
        finished: list[str] = []

        def stream() -> None:
            events = list(daemon.stream(max_tokens=150, ignore_eos=True))
            finished.append(events[-1]["choices"][0]["finish_reason"])

        def whole() -> None:
            finished.append(daemon.complete(max_tokens=150, ignore_eos=True).json()["choices"][0]["finish_reason"])

        threads = [threading.Thread(target=work) for work in [stream] * 5 + [whole] * 3]
        for thread in threads:
            thread.start()
        wait_for("six run, two wait", lambda: daemon.requests() == (6, 2), 10)
        assert known.get("/livez").headers.get("connection") != "close"
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        wait_for("readyz is 503", lambda: daemon.status_code("/readyz") == 503, 5)
        assert (daemon.status_code("/livez"), daemon.status_code("/metrics")) == (200, 200)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for refused in (known.post("/v1/chat/completions", json=body), daemon.chat()):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close" and int(refused.headers["retry-after"]) > 0
        daemon.process.send_signal(signal.SIGTERM)  # changes nothing
        brake.release()
        for thread in threads:
            thread.join(60 * SLOW)
        assert finished == ["length"] * 8
        assert daemon.wait_exit(20) == 0


def test_a_second_interrupt_stops_at_once_with_130(tmp_path: Path) -> None:
    config = DUMMY | {"http": {"port": 0, "drain_timeout": "3000s"}}
    with Daemon(tmp_path, config=config, failpoints=Brake(tmp_path).steps).start() as daemon:
        events: list[dict] = []
        reader = threading.Thread(target=lambda: events.extend(daemon.stream(max_tokens=2000, ignore_eos=True)))
        reader.start()
        wait_for("the stream runs", lambda: len(events) > 3, 10)
        assert daemon.process is not None
        pids = [p.pid for p in daemon.children()]
        daemon.process.send_signal(signal.SIGINT)
        wait_for("it drains", lambda: daemon.status_code("/readyz") == 503, 5)
        # The count is what control has last reported.
        assert re.search(r"draining; [01] running requests? may take up to 3000 s; interrupt again to stop at once", daemon.log_text())
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait_exit(20) == 130
        reader.join(20 * SLOW)
        assert events[-1]["error"]["code"] == "shutting_down"
        assert gone(pids)
        assert "KeyboardInterrupt" not in daemon.log_text()


@pytest.mark.parametrize("mode", ["now", "drain"])
def test_a_stop_during_a_reload_ends_it_by_name(tmp_path: Path, mode: str) -> None:
    """`now`: while the new engine loads; `drain`: while a request keeps the old one."""
    config = DUMMY | {"http": {"drain_timeout": "1s"}}
    steps, load = Brake(tmp_path), Brake(tmp_path, "load", on=False)
    with Daemon(tmp_path, config=config, failpoints=f"{steps.steps};{load.holds('scheduler.weights')}").start() as daemon, ThreadPoolExecutor(2) as pool:
        load.put_on()
        if mode == "drain":
            pool.submit(lambda: daemon.complete(max_tokens=1000, ignore_eos=True))
            wait_for("it runs", lambda: daemon.requests() == (1, 0), 20)
        reload = pool.submit(lambda: daemon.admin("POST", "/v1/reload", {"path": "dummy", "mode": mode}, timeout=60))
        if mode == "now":
            wait_for("the new engine loads", lambda: "failpoint scheduler.weights" in daemon.log_text(), 20)
        else:
            wait_for("it drains", lambda: daemon.status()["state"] == "reloading", 20)
        assert daemon.stop() == 0
        assert reload.result().status_code == 503
        error = reload.result().json()["error"]
        assert (error["code"], error["message"]) == ("shutting_down", "llmd is being stopped: this was not finished")
        assert "raceback" not in daemon.log_text()
        starts = len(re.findall("failpoint scheduler.weights", daemon.log_text()))
        assert starts == (1 if mode == "now" else 0), "no engine is started for it in a stop"


def test_a_second_instance_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=DUMMY, failpoints="").start() as daemon:
        assert daemon.process is not None
        argv = [str(a) for a in ("-m", "llmd.cli", "run", "-c", daemon.config_path, "--allow-failpoints")]
        import sys

        second = subprocess.run([sys.executable, *argv], env=daemon.env, capture_output=True, text=True, timeout=20 * SLOW, check=False)
        assert second.returncode == 71
        assert str(daemon.process.pid) in second.stderr
        assert daemon.complete().status_code == 200
        assert daemon.stop() == 0
