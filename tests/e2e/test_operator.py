"""The operator's seat against a whole daemon: every verb, live configuration, and answers while the engine stands still."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmctl.verbs import VERBS
from tests.daemon import LLMCTL, SLOW, Brake, Daemon, wait_for, whole_lines

CONFIG: dict[str, Any] = {"model": {"path": "dummy"}, "admin": {"group": None}, "supervision": {"hang_timeout": "60s"}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("operator")
    with Daemon(directory, config=CONFIG, failpoints=Brake(directory).steps) as started:
        yield started.start()


def ctl(daemon: Daemon, *argv: str, check: int | None = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*LLMCTL, "--socket", str(daemon.run_dir), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * SLOW, cwd=cwd)
    assert check is None or done.returncode == check, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def ask(daemon: Daemon, *argv: str) -> Any:
    return json.loads(ctl(daemon, *argv, "-o", "json").stdout)


class Streams:
    """Long answers in the background."""

    def __init__(self, daemon: Daemon, client_ids: list[str]) -> None:
        self.ends: dict[str, dict[str, Any]] = {}
        self.rids: dict[str, str] = {}
        self._threads = [threading.Thread(target=self._run, args=(daemon, name)) for name in client_ids]
        for thread in self._threads:
            thread.start()
        wait_for("all have begun", lambda: len(self.rids) == len(client_ids), 30)

    def _run(self, daemon: Daemon, name: str) -> None:
        body = {"prompt": "x" * 64, "max_tokens": 7000, "stream": True, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=60 * SLOW) as response:
            self.rids[name] = response.headers["x-llmd-rid"]
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.ends[name] = json.loads(line[6:])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60 * SLOW)


def test_every_verb_that_reads_answers_in_every_form(daemon: Daemon) -> None:
    daemon.text("a prompt that is longer than one page of the cache", max_tokens=4)
    for verb in ("status", "health", "ps", "requests", "kv", "weights", "config", "events", "logs", "audit", "version"):
        assert VERBS[verb].risk == "read"
        assert ctl(daemon, verb).stdout.strip(), verb
        if verb != "logs":
            ask(daemon, verb)
            ctl(daemon, verb, "-o", "yaml")
    assert ask(daemon, "kv")["prefix_cache"]["queried_tokens"] > 0
    assert {row["key"]: row["origin"] for row in ask(daemon, "config")["values"]}["model.path"] == f"file {daemon.config_path}:1"
    assert ctl(daemon, "wait", "--timeout", "60s").stdout == "ready\n"
    assert ctl(daemon, "lora").returncode == 0
    assert ctl(daemon, "doctor", check=None).returncode == 1, "failpoints are armed"
    report = daemon.directory / "report.tar.gz"
    ctl(daemon, "report", "--output-file", str(report))
    assert report.stat().st_size > 1000
    lock = json.loads((daemon.run_dir / "llmd.lock").read_text())
    assert lock["state_dir"] == str(daemon.directory / "state"), "llmctl finds crashes and audit there when llmd is gone"


def questions() -> list[list[str]]:
    """The commands of docs/operations.md's table of questions."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    return [shlex.split(command) for command in re.findall(r"^\| [^|]+\? \| `llmctl ([^`]+)` \|$", page, re.MULTILINE)]


def test_every_question_is_answered_while_the_scheduler_stands_still(daemon: Daemon, tmp_path: Path) -> None:
    """Reads come from control: no rank is waited for."""
    assert len(questions()) >= 15
    pid = daemon.pid("scheduler")
    os.kill(pid, signal.SIGSTOP)
    try:
        for command in questions():
            done = ctl(daemon, *command, "--timeout", f"{3 * SLOW:g}s", check=None, cwd=tmp_path)
            assert done.returncode == (1 if command[0] == "doctor" else 0), (command, done.stdout, done.stderr)
            assert done.stdout.strip(), command
    finally:
        os.kill(pid, signal.SIGCONT)


def test_abort_takes_exactly_the_request_it_is_given(daemon: Daemon) -> None:
    streams = Streams(daemon, ["job-1", "job-2", "job-3"])
    wait_for("they are listed", lambda: {row["client_id"] for row in ask(daemon, "requests")["requests"]} == {"job-1", "job-2", "job-3"}, 30)
    row = next(row for row in ask(daemon, "requests", "--sort", "pages")["requests"] if row["client_id"] == "job-1")
    assert row["rid"] == streams.rids["job-1"] and row["phase"] in ("waiting", "prefill", "decode") and row["prompt_tokens"] >= 64
    assert ctl(daemon, "abort", streams.rids["job-1"][:-1], check=None).returncode == 1, "a prefix is another id"
    assert ctl(daemon, "abort", "", check=None).returncode == 65
    assert "1 request aborted" in ctl(daemon, "abort", streams.rids["job-1"], "--dry-run").stdout
    assert ask(daemon, "abort", streams.rids["job-1"], "--reason", "a test")["data"] == {"aborted": [streams.rids["job-1"]]}
    wait_for("it has ended", lambda: "error" in streams.ends.get("job-1", {}), 30)
    assert {row["client_id"] for row in ask(daemon, "requests")["requests"]} >= {"job-2", "job-3"}
    ctl(daemon, "abort", "--client-id", "job-2")
    ctl(daemon, "abort", "--all")
    streams.join()
    assert all(end["error"]["code"] == "aborted" for end in streams.ends.values())
    entry = next(line for line in ask(daemon, "audit") if line["reason"] == "a test")
    assert (entry["verb"], entry["params"], entry["result"], entry["uid"]) == ("abort", {"rid": streams.rids["job-1"]}, "succeeded", os.getuid())


def test_the_configuration_changes_while_streams_run(daemon: Daemon) -> None:
    streams = Streams(daemon, ["steady"])
    config = json.loads(daemon.config_path.read_text())

    def write(**sections: Any) -> None:
        daemon.config_path.write_text(json.dumps({**config, **sections}))

    assert ctl(daemon, "config", "diff").stdout == "nothing has changed\n"
    write(http={**config["http"], "max_body": 2048, "strict": True})
    assert "http.max_body: 8MiB -> 2KiB  [live]" in ctl(daemon, "reload", "--dry-run").stdout
    assert daemon.complete("y" * 3000, max_tokens=1).status_code == 200
    assert "2 keys changed" in ctl(daemon, "reload").stdout
    assert daemon.complete("y" * 3000, max_tokens=1).status_code == 413
    assert daemon.complete("y", max_tokens=1, no_such_field=1).status_code == 400
    assert "steady" in {row["client_id"] for row in ask(daemon, "requests")["requests"]}, "nobody has noticed"
    write(http={**config["http"], "max_body": 2048, "workers": 3})
    refused = ctl(daemon, "reload", check=75)
    assert "http.workers" in refused.stderr and "restart" in refused.stderr
    assert daemon.complete("y", max_tokens=1, no_such_field=1).status_code == 400, "of a refused change nothing is taken"
    daemon.config_path.write_text("http: {prot: 1}")
    assert "prot" in ctl(daemon, "config", "reload", check=65).stderr
    write(http={**config["http"], "max_body": 4096})
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    wait_for("the hangup is seen to", lambda: daemon.complete("y" * 3000, max_tokens=1).status_code == 200, 20)
    write()
    ctl(daemon, "reload")
    ctl(daemon, "abort", "--all")
    streams.join()


def test_an_engine_key_restarts_the_engine_and_a_stream_goes_on(daemon: Daemon) -> None:
    config = json.loads(daemon.config_path.read_text())
    epoch = daemon.status()["epoch"]
    streams = Streams(daemon, ["steady"])
    daemon.config_path.write_text(json.dumps({**config, "memory": {"max_total_tokens": 16384}}))
    done = ask(daemon, "reload")
    assert done["state"] == "succeeded" and done["plan"]["processes_restarted"] == ["scheduler-0"]
    status = daemon.status()
    assert (status["kv"]["pages_total"], status["epoch"]) == (1024, epoch + 1)
    daemon.config_path.write_text(json.dumps({**config, "memory": {"max_total_tokens": 32}}))
    failed = ctl(daemon, "reload", check=1)
    assert "the old one is back" in failed.stderr
    assert daemon.status()["kv"]["pages_total"] == 1024
    daemon.config_path.write_text(json.dumps(config))
    ctl(daemon, "reload")
    ctl(daemon, "abort", "--all")
    streams.join()
    assert streams.ends["steady"]["error"]["code"] == "aborted", "until then it had gone on"


def test_events_are_followed_over_a_new_control(daemon: Daemon, tmp_path: Path) -> None:
    last = daemon.admin("GET", "/v1/events?follow=false").json()["last"]
    out = tmp_path / "events"
    argv = [sys.executable, "-m", "llmctl.main", "--socket", str(daemon.run_dir), "events", "-f", "--since", str(last), "-o", "json"]
    with out.open("wb") as stream:
        follower = subprocess.Popen(argv, stdout=stream, stderr=subprocess.PIPE)
    try:
        ctl(daemon, "flush", "--timeout", "60s")
        wait_for("the flush is told", lambda: "flush: succeeded" in out.read_text(), 30)
        os.kill(daemon.pid("control"), signal.SIGKILL)
        wait_for("control answers", daemon.status, 30)
        ctl(daemon, "resume")
        wait_for("the follower is there again", lambda: "resume: succeeded" in out.read_text(), 30)
    finally:
        follower.kill()
        follower.communicate()
    numbers = [json.loads(line)["seq"] for line in whole_lines(out)]
    assert numbers == sorted(set(numbers)) and numbers[0] > last


def test_log_levels_change_in_the_process_that_is_named(daemon: Daemon) -> None:
    before = ask(daemon, "log-level", "debug", "frontend")
    assert before["data"]["processes"] == ["frontend-0"]
    assert ask(daemon, "log-level", "default")["data"]["level"] == "info"


def test_the_last_verb_stops_it_and_says_so(daemon: Daemon) -> None:
    assert "stopped" in ctl(daemon, "stop", "--reason", "the end").stdout
    assert daemon.wait_exit() == 0
    assert ctl(daemon, "wait", "--for", "stopped").stdout == "stopped\n"
    gone = ctl(daemon, "kv", check=3)
    assert "llmd run" in gone.stderr or "systemctl start" in gone.stderr
