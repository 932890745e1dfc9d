"""What the supervisor shows: supervisorctl, systemd's notify socket, logs, the lock, the state file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.supervisor.harness import SLOW, Embedded, full, gone, spec, until

Make = Callable[..., Embedded]


class Notified:
    """A notify socket that records what it is told and by whom."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._all: list[str] = []

    def all(self) -> list[str]:
        while True:
            try:
                self._all.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self._all

    def count(self, text: str) -> int:
        return sum(message.startswith(text) for message in self.all())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[Notified]:
    made = Notified(tmp_path / "notify")
    yield made
    made.close()


def test_systemd_hears_ready_once_status_and_stopping(embedded: Make, notified: Notified, tmp_path: Path) -> None:
    one = embedded(full()).start(env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    one.report(state="loading", status="loading weights", progressing=True)
    assert notified.count("READY=1") == 0
    one.ready(status="ready")
    one.ready(status="ready")
    one.wait_started("control-0")
    os.kill(one.pid("control-0"), signal.SIGKILL)
    one.wait_started("control-0", 2)
    one.ready(status="ready")
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    one.call("shutdown", status=0, why="test")
    assert one.wait() == 0
    assert notified.all().index("STATUS=loading weights") < notified.all().index("READY=1")
    assert notified.count("READY=1") == 1
    assert notified.count("STOPPING=1") == 1
    assert one.log().count("banner") == 1


def test_the_watchdog_is_pinged_only_while_control_says_all_is_well(embedded: Make, notified: Notified, tmp_path: Path) -> None:
    one = embedded(full(), control_timeout=60.0).start(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"})
    one.ready()
    until("pings", lambda: notified.count("WATCHDOG=1") >= 4)
    one.report(state="ready", progressing=False, ready=True)
    before = notified.count("WATCHDOG=1")
    time.sleep(0.8)
    assert notified.count("WATCHDOG=1") <= before + 1


def test_a_supervisor_that_hangs_is_seen_by_the_watchdog(embedded: Make, notified: Notified, tmp_path: Path) -> None:
    one = embedded(full(), control_timeout=60.0).start(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"})
    one.ready()
    until("pings", lambda: notified.count("WATCHDOG=1") >= 2)
    one.signal(signal.SIGSTOP)
    assert one.process is not None
    stopped = psutil.Process(one.process.pid)
    until("it stands still", lambda: stopped.status() == psutil.STATUS_STOPPED)
    before = notified.count("WATCHDOG=1")
    time.sleep(0.6)
    assert notified.count("WATCHDOG=1") == before
    one.signal(signal.SIGCONT)


def test_supervisorctl_works_and_an_operator_is_obeyed(embedded: Make) -> None:
    one = embedded([*full()[:3], *(spec("scheduler", "work", rank=rank) for rank in range(2))]).start()
    one.ready()
    status = one.supervisorctl("status")
    assert status.returncode == 0
    assert all(word in status.stdout for word in ("control-0", "frontend-0", "detokenizer-0", "engine:scheduler-0", "RUNNING"))
    assert "not with llmd" in one.supervisorctl("reload").stdout
    stopped = one.supervisorctl("stop", "engine:scheduler-0")
    assert "scheduler-0: stopped" in stopped.stdout
    until("the engine stops as one", lambda: not one.pid("scheduler-1"))
    assert one.call("restartEngine", reason="control wants it")["ok"] is False
    started = one.supervisorctl("start", "engine:scheduler-0")
    assert "scheduler-0: started" in started.stdout
    until("the engine starts as one", lambda: one.pid("scheduler-1"))
    assert one.snapshot()["epoch"] == 2
    assert one.supervisorctl("restart", "detokenizer-0").returncode == 0
    assert one.supervisorctl("shutdown").returncode == 0
    until("it drains", lambda: one.snapshot()["stopping"])


def test_an_operators_stop_cancels_a_restart(embedded: Make) -> None:
    one = embedded(full(), restart={"max": 50, "window": 60.0, "backoff": [0.3, 0.3, 0.3]}).start()
    one.ready()
    one.wait_started("scheduler-0")

    def waits() -> bool:
        """It is killed again where its wait was over before anybody looked."""
        child = one.child("scheduler-0")
        if child["pid"]:
            with contextlib.suppress(ProcessLookupError):  # of the kill before, reaped since it was asked for
                os.kill(child["pid"], signal.SIGKILL)
        return bool(child["state"] == "backoff")

    until("it waits", waits)
    one.rpc("supervisor.stopProcess", "engine:scheduler-0")
    before = one.child("scheduler-0")["incarnation"]
    time.sleep(0.8)
    after = one.child("scheduler-0")
    assert (after["incarnation"], after["pid"]) == (before, 0)


def test_a_waiting_stop_does_not_take_a_core(embedded: Make) -> None:
    one = embedded(full(scheduler="stubborn"), stop_timeout=1.0).start()
    one.ready()
    one.wait_started("scheduler-0")
    assert one.process is not None
    process = psutil.Process(one.process.pid)
    before = sum(process.cpu_times()[:2])
    one.rpc("supervisor.stopProcess", "engine:scheduler-0")
    assert sum(process.cpu_times()[:2]) - before < 0.6


def test_a_plain_supervisord_refuses_the_file(embedded: Make) -> None:
    one = embedded(full()).start()
    conf = one.run_dir / "private" / "supervisord.conf"
    copy = one.directory / "copy"
    copy.mkdir()
    text = conf.read_text().replace("[fcgi-program:frontend-0]", "[program:frontend-0]").replace("socket = tcp://127.0.0.1:1\n", "")
    (copy / "supervisord.conf").write_text(text)
    argv = [sys.executable, "-m", "supervisor.supervisord", "-c", str(copy / "supervisord.conf")]
    plain = subprocess.run(argv, capture_output=True, timeout=30 * SLOW, check=False)
    assert plain.returncode != 0
    assert b"rpc interface" in plain.stderr
    assert all(one.pid(name) for name in one.names)


def test_a_second_instance_ends_with_71_and_names_the_first(embedded: Make) -> None:
    one = embedded(full()).start()
    assert one.process is not None
    again = [sys.executable, str(Path(__file__).with_name("embed.py")), str(one.directory / "given.json")]
    second = subprocess.run(again, capture_output=True, text=True, timeout=30 * SLOW, check=False)
    assert second.returncode == 71
    assert f"pid {one.process.pid}" in second.stderr
    assert all(one.pid(name) for name in one.names)


def test_a_start_after_a_kill_finds_stale_sockets_and_is_not_slowed(embedded: Make) -> None:
    one = embedded(full()).start()
    pids = [one.pid(name) for name in one.names]
    one.signal(signal.SIGKILL)
    one.wait()
    assert (one.run_dir / "private" / "supervisor.sock").exists()
    until("the children are gone", lambda: all(gone(pid) for pid in pids))
    one.start()
    assert "stale" not in one.log()
    assert one.call("shutdown", status=0, why="test")["ok"]
    assert one.wait() == 0


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_nobody_reads_stderr_and_nothing_stands_still(embedded: Make, kind: str) -> None:
    one = embedded(full(scheduler="spam"), control_timeout=60.0)
    reader, writer = socket.socketpair() if kind == "socket" else os.pipe()
    try:
        one.start(stderr=writer)
        one.ready()
        until("the child goes on logging", lambda: sum(line["what"] == "spam" for line in one.trace()) > 20)
        asked = time.monotonic()
        one.snapshot()
        assert time.monotonic() - asked < 5 * SLOW
        one.call("shutdown", status=0, why="test")
        assert one.wait() == 0
    finally:
        for end in (reader, writer):
            end.close() if isinstance(end, socket.socket) else os.close(end)
    files = list((one.directory / "log").glob("scheduler-0.log*"))
    assert sum(file.stat().st_size for file in files) > 20 * 2000 * 201 * 0.9


def test_the_state_file_tells_the_last_state(embedded: Make) -> None:
    one = embedded(full()).start(up=False)
    path = one.run_dir / "state.json"
    until("the file", path.exists)
    assert json.loads(path.read_text())["state"] == "starting"
    until("the supervisor answers", lambda: one.pid("control-0"))
    one.report(state="loading", stage="weights", reason="")
    assert json.loads(path.read_text())["stage"] == "weights"
    one.call("giveUp", status=70, why="lost")
    assert one.wait() == 70
    last = json.loads(path.read_text())
    assert (last["state"], last["reason"]) == ("failed", "lost")


def test_settings_are_changed_while_running(embedded: Make) -> None:
    one = embedded(full()).start()
    one.ready()
    assert one.call("configure", log_level="debug", drain_timeout=1.5, restart={"max": 0, "window": 60.0, "backoff": [0.0, 1.0, 30.0]}) == {
        "ok": True,
        "message": "",
    }
    with pytest.raises(Exception, match="INCORRECT_PARAMETERS"):
        one.call("configure", port=1)
    os.kill(one.pid("detokenizer-0"), signal.SIGKILL)
    assert one.wait() == 70, "a budget of no restarts"


def test_a_bad_argument_is_a_fault_and_changes_nothing(embedded: Make) -> None:
    one = embedded(full()).start()
    with pytest.raises(Exception, match="INCORRECT_PARAMETERS"):
        one.rpc("llmd.shutdown", "not json")
    with pytest.raises(Exception, match="INCORRECT_PARAMETERS"):
        one.call("shutdown", status="seventy")
    assert all(one.pid(name) for name in one.names)


def test_one_thread_and_no_work_when_idle(embedded: Make) -> None:
    one = embedded(full(), control_timeout=60.0).start()
    one.ready()
    for name in one.names:
        one.wait_started(name)
    assert one.process is not None
    process = psutil.Process(one.process.pid)
    assert process.num_threads() == 1
    before = sum(process.cpu_times()[:2])
    time.sleep(1.5)
    assert sum(process.cpu_times()[:2]) - before < 0.15
