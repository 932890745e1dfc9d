"""llmd itself killed at any time: nothing is left behind, and the next start works at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.daemon import SLOW, Brake, Daemon, gone, wait_for

CONFIG = {"model": {"path": "dummy"}}


def kill_and_check(daemon: Daemon) -> None:
    pids = [p.pid for p in daemon.children()]
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait(10 * SLOW)
    wait_for("every child is gone", lambda: gone(pids), 5)


def test_killed_when_ready(tmp_path: Path) -> None:
    for _ in range(3):
        with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
            daemon.text()
            kill_and_check(daemon)


def test_killed_while_loading(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=CONFIG, failpoints=Brake(tmp_path).holds("scheduler.start")).start(ready=False) as daemon:
        daemon.pid("scheduler")
        kill_and_check(daemon)
    with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
        assert daemon.stop() == 0


def test_killed_with_a_stopped_scheduler(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
        os.kill(daemon.pid("scheduler"), signal.SIGSTOP)
        kill_and_check(daemon)


def cycles(directory: Path, count: int) -> None:
    tmp = directory / "tmp"
    tmp.mkdir()
    for cycle in range(count):
        with Daemon(directory, config=CONFIG, failpoints="", env={"TMPDIR": str(tmp)}).start() as daemon:
            for _ in range(5):
                daemon.text()
            kill_and_check(daemon)
            files = sorted(p.name for p in daemon.run_dir.rglob("*"))
        leftovers = len(files), len(list(tmp.iterdir()))
        if cycle == 0:
            first = leftovers
        assert leftovers[0] <= first[0] and leftovers[1] <= first[1], f"files pile up: {files}"
    with Daemon(directory, config=CONFIG, failpoints="").start() as daemon:
        assert all(daemon.complete().status_code == 200 for _ in range(200))
        assert daemon.stop() == 0


def test_cycles_of_kill_and_start(tmp_path: Path) -> None:
    cycles(tmp_path, 4)


@pytest.mark.soak
def test_twenty_cycles_of_kill_and_start(tmp_path: Path) -> None:
    cycles(tmp_path, 20)


def test_a_regular_file_at_a_socket_path_is_never_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o750)
    (run / "admin.sock").write_text("precious")
    with Daemon(tmp_path, config=CONFIG, failpoints="") as daemon:
        with pytest.raises(AssertionError, match="llmd ended with 71"):
            daemon.start()
        assert "admin.sock" in daemon.log_text()
    assert (run / "admin.sock").read_text() == "precious"
