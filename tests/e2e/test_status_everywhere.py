"""`llmctl status -o json` in every state of one life: valid, quick, with the same keys, and an exit status that scripts can use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.daemon import SLOW, Daemon, wait_for

CONFIG: dict[str, Any] = {"model": {"path": "dummy"}, "admin": {"group": None}, "supervision": {"control_timeout": "60s", "hang_timeout": "60s"}}
KEYS = {"state", "processes", "weights_version", "requests", "kv", "uptime_s"}


def ask(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "llmctl.main", "--socket", str(daemon.run_dir), "status", "-o", "json"]
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert time.monotonic() - began < 6 * SLOW
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer.keys() >= KEYS and answer["requests"].keys() == {"running", "waiting", "held"}
    return done.returncode, answer


def test_status_while_it_starts_and_loads(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=CONFIG, failpoints="scheduler.weights=hang").start(ready=False) as daemon:
        assert ask(daemon)[0] == 1
        wait_for("it loads", lambda: daemon.status().get("state") == "loading", 60)
        status, loading = ask(daemon)
        assert (status, loading["state"]) == (1, "loading") and len(loading["processes"]) == 5
        assert daemon.stop() == 0


def test_status_in_every_state_of_a_life(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
        status, ready = ask(daemon)
        assert (status, ready["state"]) == (0, "ready")
        assert {process["role"] for process in ready["processes"]} == {"supervisor", "control", "frontend", "detokenizer", "scheduler"}
        assert all(process["pid"] and process["restarts"] == 0 for process in ready["processes"]) and ready["kv"]["pages_total"] > 0
        daemon.admin("POST", "/v1/drain", {})
        status, draining = ask(daemon)
        assert (status, draining["state"]) == (1, "draining")
        daemon.admin("POST", "/v1/resume", {})
        for role, wanted in (("scheduler", 0), ("control", 4)):
            pid = daemon.pid(role)
            os.kill(pid, signal.SIGSTOP)
            try:
                assert ask(daemon)[0] == wanted, role
            finally:
                os.kill(pid, signal.SIGCONT)
        assert daemon.stop() == 0
        status, gone = ask(daemon)
        assert (status, gone["state"]) == (3, "stopped")
