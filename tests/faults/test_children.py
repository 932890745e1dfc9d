"""Each child may be killed or stopped: it comes back, and connections that do not depend on it are unharmed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.daemon import HANGS, SLOW, Brake, Daemon, gone, wait_for

FAST = {"supervision": {"hang_timeout": HANGS, "helper_timeout": HANGS, "control_timeout": HANGS, "restart": {"max": 1000}}, "model": {"path": "dummy"}}


def restarts(daemon: Daemon, role: str) -> int:
    return sum(p["restarts"] for p in daemon.status()["processes"] if p["role"] == role)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "frontend", "control"])
def test_a_child_that_dies_or_hangs_comes_back(tmp_path: Path, role: str, signum: signal.Signals) -> None:
    with Daemon(tmp_path, config=FAST, failpoints="").start() as daemon:
        before = daemon.text()
        pids = {r: daemon.pid(r) for r in ("scheduler", "detokenizer", "frontend", "control")}
        os.kill(pids[role], signum)
        wait_for(f"a new {role}", lambda: (c := daemon.child(role)) and c.pid != pids[role] and gone([pids[role]]), 15)
        wait_for("readyz is 200", lambda: daemon.status_code("/readyz") == 200, 15)
        wait_for("an answer", lambda: daemon.complete().status_code == 200, 15)
        assert daemon.text() == before
        others = {r: daemon.pid(r) for r in pids if r != role}
        assert others == {r: pid for r, pid in pids.items() if r != role}, "only the faulty process is replaced"
        wait_for("the restart is counted", lambda: restarts(daemon, role) == 1, 5)
        assert daemon.stop() == 0


def test_control_comes_back_where_somebody_has_removed_the_socket_for_its_reports(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=FAST, failpoints="").start() as daemon:
        (daemon.run_dir / "private" / "reports.sock").unlink()
        os.kill(control := daemon.pid("control"), signal.SIGKILL)
        wait_for("a new control", lambda: (c := daemon.child("control")) and c.pid != control, 15)
        wait_for("it is heard", lambda: restarts(daemon, "control") == 1 and daemon.status()["state"] == "ready", 15)
        assert daemon.stop() == 0


def test_a_killed_scheduler_is_known_at_once_and_streams_go_on(tmp_path: Path) -> None:
    steps, load = Brake(tmp_path), Brake(tmp_path, "load", on=False)
    with Daemon(tmp_path, config=FAST, failpoints=f"{steps.steps};{load.holds('scheduler.weights')}").start() as daemon:
        events: list[dict] = []

        def read() -> None:
            events.extend(daemon.stream("hello", max_tokens=200, ignore_eos=True))

        reader = threading.Thread(target=read)
        reader.start()
        wait_for("the stream runs", lambda: len(events) > 3, 10)
        load.put_on()
        os.kill(daemon.pid("scheduler"), signal.SIGKILL)
        killed = time.monotonic()
        body = wait_for("readyz is 503", lambda: (r := httpx.get(daemon.url + "/readyz", timeout=20 * SLOW)).status_code == 503 and r.json(), 5, 0.005)
        assert time.monotonic() - killed < 5 * SLOW
        assert "scheduler" in body["reason"] and "SIGKILL" in body["reason"], body
        assert daemon.status_code("/livez") == 200
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(daemon.text)
            wait_for("a new request waits", lambda: daemon.in_flight() == 2, 10)
            load.release()
            steps.release()
            assert asked.result(60 * SLOW) == "hellohel"
        reader.join(60 * SLOW)
        assert not reader.is_alive(), "the stream must not hang"
        assert "".join(event["choices"][0]["text"] for event in events) == "hello" * 40
        daemon.wait_ready(20)
        wait_for("the restart is counted", lambda: restarts(daemon, "scheduler") == 1, 5)
        assert daemon.stop() == 0
        dead = [line for line in daemon.log_text().splitlines() if "SIGKILL" in line and "scheduler" in line and "error" in line.lower()]
        assert len(dead) == 1, "one ERROR line with role, pid and signal"


def test_a_frontend_that_dies_breaks_only_its_own_connections(tmp_path: Path) -> None:
    config = FAST | {"http": {"port": 0, "workers": 2}}
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config, failpoints=brake.steps).start() as daemon:
        results: list[str] = []

        def run() -> None:
            try:
                events = list(daemon.stream(max_tokens=300, ignore_eos=True))
                results.append(events[-1]["choices"][0]["finish_reason"] if "choices" in events[-1] else "error")
            except (httpx.HTTPError, AssertionError):
                results.append("broken")

        threads = streams_on_both(daemon, run)
        os.kill(daemon.pid("frontend", 0), signal.SIGKILL)
        wait_for("its connections are broken", lambda: "broken" in results, 20)
        brake.release()
        for thread in threads:
            thread.join(60 * SLOW)
        assert set(results) == {"length", "broken"} and len(results) == len(threads), results
        wait_for("the dead frontend's requests are dropped", lambda: daemon.requests() == (0, 0), 5)
        wait_for("two frontends again", lambda: daemon.child("frontend", 0) and daemon.child("frontend", 1), 10)
        assert daemon.stop() == 0


def streams_on_both(daemon: Daemon, run: Callable[[], None]) -> list[threading.Thread]:
    """Threads that run `run`, one stream each: so many that both frontends have some, for nothing says that they share connections evenly."""
    threads: list[threading.Thread] = []
    for count in (16, 32, 48, 64):
        threads += [threading.Thread(target=run) for _ in range(16)]
        for thread in threads[-16:]:
            thread.start()
        wait_for("all run", lambda count=count: daemon.requests()[0] == count, 20)  # type: ignore[misc]
        if {row["frontend"] for row in daemon.admin("GET", "/v1/requests").json()["requests"]} == {0, 1}:
            break
    return threads


def test_crashes_are_recorded_with_what_is_known_of_them(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=FAST, failpoints="scheduler.prompt(SPIN)=spin").start() as daemon:
        pid = daemon.pid("detokenizer")
        os.kill(pid, signal.SIGSEGV)
        wait_for("a new detokenizer", lambda: (c := daemon.child("detokenizer")) and c.pid != pid, 15)
        daemon.wait_ready()
        hung = daemon.pid("scheduler")
        answer = daemon.complete("SECRET SPIN", max_tokens=4)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_crash", "a request that hangs engines is found out as well"
        spun, fell = daemon.admin("GET", "/v1/crashes").json()["crashes"][-2:]
        assert (fell["process"], fell["pid"], fell["reason"], fell["status"]) == ("detokenizer-0", pid, "signal", -signal.SIGSEGV)
        assert any("Segmentation fault" in line for line in fell["stacks"]) and not fell["oom"]
        assert (spun["process"], spun["reason"], spun["status"]) == ("scheduler-0", "hang", -signal.SIGKILL)
        assert "in one step" in spun["why"] and "busy" in spun["phase"] and spun["weights_version"] == "dummy@000000000000"
        assert any("failpoints.py" in line for line in spun["stacks"]) and len(spun["stacks"]) <= 200
        assert "SECRET" not in str(spun) + daemon.log_text()
        assert spun["pid"] == hung and gone([hung])
        assert daemon.stop() == 0
