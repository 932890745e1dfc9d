"""`llmctl restart --all`: llmd as a whole starts anew in the same process, with the configuration as it is then; what runs finishes, and a stop beats it."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.daemon import LLMCTL, SLOW, Brake, Daemon, wait_for

CONFIG: dict[str, Any] = {"model": {"path": "dummy"}, "admin": {"group": None}, "http": {"drain_timeout": "600s"}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("again")
    with Daemon(directory, config=CONFIG, failpoints=Brake(directory).steps) as started:
        yield started.start()


def ctl(daemon: Daemon, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [*LLMCTL, "--socket", str(daemon.run_dir), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120 * SLOW, check=False)


def write(daemon: Daemon, **http: Any) -> dict[str, Any]:
    """The configuration with other values in `http`; the one before."""
    before: dict[str, Any] = json.loads(daemon.config_path.read_text())
    daemon.config_path.write_text(json.dumps({**before, "http": {**before["http"], **http}}))
    return before


def test_a_configuration_that_would_not_start_changes_nothing(daemon: Daemon) -> None:
    before, life = write(daemon, prot=1), daemon.status()["start_id"]
    refused = ctl(daemon, "restart", "--all")
    assert refused.returncode == 65 and "prot" in refused.stderr
    assert (daemon.status()["state"], daemon.status()["start_id"]) == ("ready", life)
    daemon.config_path.write_text(json.dumps(before))


def test_it_takes_what_only_a_restart_takes_and_lets_running_requests_finish(daemon: Daemon) -> None:
    assert daemon.process is not None
    life, pid, answers = daemon.status()["start_id"], daemon.process.pid, []
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    running = threading.Thread(target=lambda: answers.append(httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60 * SLOW)))
    running.start()
    wait_for("it runs", lambda: daemon.status()["requests"]["running"] == 1, 30)
    write(daemon, workers=2, port=daemon.port)
    planned = ctl(daemon, "restart", "--all", "--dry-run")
    assert "start llmd anew" in planned.stdout and "1 request waited for" in planned.stdout and "while it drains" in planned.stdout, planned
    assert daemon.status()["start_id"] == life
    with ThreadPoolExecutor(1) as pool:
        restart = pool.submit(ctl, daemon, "restart", "--all", "--reason", "two workers")
        wait_for("it drains", lambda: daemon.status().get("state") == "draining", 60)
        assert not answers
        brake = Brake(daemon.directory)
        brake.release()
        done = restart.result()
        brake.put_on()
    assert done.returncode == 0, done.stderr
    running.join(60 * SLOW)
    assert answers[0].json()["usage"]["completion_tokens"] == 100
    status = daemon.status()
    assert status["start_id"] != life and status["processes"][0]["pid"] == pid == daemon.process.pid
    assert sum(process["role"] == "frontend" for process in status["processes"]) == 2
    assert daemon.complete("y", max_tokens=1).status_code == 200
    line = daemon.admin("GET", "/v1/audit").json()["audit"][0]
    assert (line["verb"], line["params"], line["reason"], line["result"]) == ("restart", {"target": "daemon"}, "two workers", "succeeded")


def test_a_stop_beats_it(daemon: Daemon) -> None:
    """While it drains for the restart, and a request holds that up."""
    assert daemon.process is not None
    body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60 * SLOW) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert ctl(daemon, "restart", "--all", "--no-wait").returncode == 0
        wait_for("it drains", lambda: daemon.status().get("state") == "draining", 30)
        daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60 * SLOW) == 0, "its client has gone, and it does not start again"
