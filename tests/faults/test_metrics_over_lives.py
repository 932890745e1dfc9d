"""Gauges tell of what is alive, counters never go down while llmd lives, and a new life begins at 0."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.daemon import SLOW, Brake, Daemon, wait_for

CONFIG: dict[str, Any] = {"model": {"path": "dummy"}, "admin": {"group": None}, "supervision": {"restart": {"max": 100}}}
STREAMS = 5


class Stream:
    """One long answer in the background."""

    def __init__(self, daemon: Daemon) -> None:
        self.tokens = 0
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, args=(daemon,))
        self._thread.start()

    def _run(self, daemon: Daemon) -> None:
        body = {"prompt": "x" * 40, "max_tokens": 7000, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60 * SLOW) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event["error"]["code"] if "error" in event else self.error
                    self.tokens += 1

    def join(self) -> None:
        self._thread.join(60 * SLOW)


def counters(daemon: Daemon) -> dict[str, float]:
    """Every counter, by its series."""
    text = httpx.get(f"{daemon.url}/metrics", timeout=30 * SLOW).text
    kinds = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and line.endswith(" counter")}
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs if series.partition("{")[0] in kinds}


def test_recovered_streams_are_running_ones_and_counters_go_on(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=CONFIG, failpoints=Brake(tmp_path).steps).start() as daemon:
        streams = [Stream(daemon) for _ in range(STREAMS)]
        wait_for("they run", lambda: daemon.metric("llmd_requests_running") == STREAMS and all(stream.tokens for stream in streams), 60)
        wait_for("tokens are counted", lambda: daemon.metric("llmd_generation_tokens_total") > 0, 30)
        before, dead = counters(daemon), daemon.pid("scheduler")
        os.kill(dead, signal.SIGKILL)
        wait_for("they run again", lambda: daemon.metric("llmd_requests_recovered_total") == STREAMS and daemon.metric("llmd_requests_running") == STREAMS, 60)
        after = counters(daemon)
        assert {series: value for series, value in before.items() if after.get(series, 0.0) < value} == {}
        assert not any(f'"{dead}"' in series for series in after)
        daemon.admin("POST", "/v1/abort", {"all": True})
        for stream in streams:
            stream.join()
        assert [stream.error for stream in streams] == ["aborted"] * STREAMS
        wait_for("none runs", lambda: daemon.metric("llmd_requests_running") == 0 == daemon.metric("llmd_requests_waiting"), 30)


def test_a_new_life_counts_from_zero_whatever_the_old_one_has_left(tmp_path: Path) -> None:
    foreign = tmp_path / "run" / "foreign.db"
    with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
        foreign.write_bytes(b"somebody else's")
        for _ in range(10):
            daemon.text(max_tokens=3)
        wait_for("they are counted", lambda: daemon.metric('llmd_requests_total{endpoint="/v1/completions",outcome="length"}') == 10, 30)
        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait(10)
    with Daemon(tmp_path, config=CONFIG, failpoints="").start() as daemon:
        assert sum(value for series, value in counters(daemon).items() if series.startswith("llmd_requests_total")) == 0
        assert daemon.metric("llmd_generation_tokens_total") == 0
        daemon.text(max_tokens=3)
        wait_for("one is counted", lambda: daemon.metric("llmd_generation_tokens_total") == 3, 30)
        assert foreign.read_bytes() == b"somebody else's"
