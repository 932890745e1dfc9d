"""What llmctl shows and asks before it changes something, and how it tells that it does not know how that ended."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmctl.context import BACK_WITHIN
from llmctl.main import main
from tests.daemon import SLOW, wait_for
from tests.integration.llmctl.fake import STATUS, Fake, process_named_llmd, serving

PLAN = {
    "steps": ["start scheduler-0 anew", "wait until the engine is ready"], "processes_restarted": ["scheduler-0"], "requests_held": 2, "requests_aborted": 0,
    "tokens_dropped": 0, "pages_forgotten": 7, "downtime_s": 2.5, "changes": [],
}  # fmt: skip
DONE = {"id": "op-1", "verb": "restart", "state": "succeeded", "results": [], "data": {"epoch": 2}, "plan": PLAN}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with serving(tmp_path) as served:
        served.answers["/v1/restart"] = (200, DONE)
        yield served


def ctl(fake: Fake, *argv: str) -> int:
    return main(["--socket", str(fake.run_dir), *argv])


def test_a_control_that_is_replaced_meanwhile_is_asked_for_the_same_call(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with process_named_llmd() as llmd:
        (fake.run_dir / "llmd.lock").write_text(json.dumps({"pid": llmd.pid, "start_id": "abc", "version": "0.1.0"}))
        fake.drop = 2
        assert ctl(fake, "restart", "--yes") == 0
    shown = capsys.readouterr()
    assert "epoch 2" in shown.out and "was replaced" in shown.err
    assert len(fake.keys) == 2 and fake.keys[0] and len(set(fake.keys)) == 1


def test_a_change_waits_for_a_control_that_is_away_and_a_question_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        llmd = stack.enter_context(process_named_llmd())
        (tmp_path / "llmd.lock").write_text(json.dumps({"pid": llmd.pid, "start_id": "abc", "version": "0.1.0"}))
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(tmp_path / "admin.sock"))
        begun: list[Fake] = []

        def replace_control(_: float) -> None:
            (tmp_path / "admin.sock").unlink()
            begun.append(stack.enter_context(serving(tmp_path)))
            begun[0].answers["/v1/restart"] = (200, DONE)

        monkeypatch.setattr("llmctl.client.time", SimpleNamespace(monotonic=time.monotonic, sleep=replace_control))
        assert main(["--socket", str(tmp_path), "kv"]) == 4 and not begun
        assert main(["--socket", str(tmp_path), "restart", "--yes"]) == 0
        assert [path for _, path, _ in begun[0].seen] == ["/v1/restart"]
    assert "epoch 2" in capsys.readouterr().out


def test_what_has_ended_is_not_waited_for(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.drop = True
    began = time.monotonic()
    assert ctl(fake, "restart", "--yes") == 69
    assert time.monotonic() - began < BACK_WITHIN
    assert ctl(fake, "stop", "--yes") == 69
    assert fake.keys[-1] is None, "a stop ends what it asks"


def test_a_dry_run_shows_the_plan_and_changes_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/restart"] = (200, {"verb": "restart", "dry_run": True, "plan": PLAN})
    assert ctl(fake, "restart", "--dry-run") == 0
    assert fake.seen == [("POST", "/v1/restart", {"dry_run": True})]
    assert capsys.readouterr().out.splitlines() == [
        "1. start scheduler-0 anew",
        "2. wait until the engine is ready",
        "cost: 2 requests held; 7 cached pages dropped; restarted: scheduler-0; without an engine for about 2.5s",
    ]
    assert ctl(fake, "restart", "--dry-run", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["requests_held"] == 2


def on_terminal(fake: Fake, *argv: str, typed: str) -> tuple[int, str]:
    """Run llmctl on a pseudo-terminal, type when it asks; its exit status and all that was to be read."""
    command = [sys.executable, "-m", "llmctl.main", "--socket", str(fake.run_dir), *argv]
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            part = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
        if typed and b"[y/N]" in seen:
            os.write(master, typed.encode())
            typed = ""
    os.close(master)
    return process.wait(20), seen.decode()


def test_on_a_terminal_a_risky_change_is_planned_and_asked_for(fake: Fake) -> None:
    fake.answers["/v1/restart"] = (200, {**DONE, "dry_run": True})
    status, seen = on_terminal(fake, "restart", typed="n\n")
    assert status == 1 and "nothing was done" in seen and "2 requests held" in seen
    assert [body for _, _, body in fake.seen] == [{"dry_run": True}]
    status, seen = on_terminal(fake, "restart", typed="y\n")
    assert status == 0 and "restarted: engine epoch 2" in seen
    assert [body for _, _, body in fake.seen[1:]] == [{"dry_run": True}, {}]
    status, seen = on_terminal(fake, "restart", "--yes", typed="")
    assert status == 0 and "Go on?" not in seen
    fake.answers["/v1/resume"] = (200, DONE)
    assert on_terminal(fake, "resume", typed="")[0] == 0, "what nobody notices needs no question"


def test_watching_shows_it_again_until_interrupted(fake: Fake) -> None:
    command = [sys.executable, "-m", "llmctl.main", "--socket", str(fake.run_dir), "status", "-w", "50ms", "--timeout", "60s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_for("it has asked three times", lambda: len(fake.seen) >= 3, 60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30 * SLOW)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, b"")
    assert out.count(b"state     ready") >= 2 and b"\x1b" not in out


def test_without_a_terminal_nothing_is_asked(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(fake, "restart", "--no-wait") == 0
    assert [body for _, _, body in fake.seen] == [{"wait": False}]
    capsys.readouterr()


def test_wait_lets_a_drain_take_its_time(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/drain"] = (200, {**DONE, "verb": "drain"})
    assert ctl(fake, "drain", "--wait") == 0
    assert fake.seen[-1][2] == {"timeout_s": 86400.0}
    assert "drained" in capsys.readouterr().out


def test_an_answer_that_never_comes_leaves_a_change_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.context.CHANGE_TIMEOUT", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "admin.sock"))
        silent.listen(5)
        assert main(["--socket", str(tmp_path), "resume"]) == 69
        assert "may still go on" in capsys.readouterr().err
        monkeypatch.setattr("llmctl.context.READ_TIMEOUT", 0.2)
        assert main(["--socket", str(tmp_path), "kv"]) == 4
    capsys.readouterr()


def test_the_daemon_may_not_know_either(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "not known", "type": "server_error", "param": None, "code": "engine_unavailable", "hint": None, "operation_id": "op-1"}
    fake.answers["/v1/restart"] = (503, {"error": error, "operation": {**DONE, "state": "failed", "outcome": "unknown"}})
    assert ctl(fake, "restart") == 69
    capsys.readouterr()


def test_a_conflict_says_who_holds_it(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    hint = "llmctl wait --operation op-7 (GET /v1/operations/op-7), then try again"
    error = {"message": "operation op-7 (restart) runs", "type": "x", "param": None, "code": "busy", "hint": hint, "operation_id": "op-7"}
    fake.answers["/v1/restart"] = (409, {"error": error})
    assert ctl(fake, "restart") == 75
    assert "llmctl wait --operation op-7" in capsys.readouterr().err


def test_over_tcp_with_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            data = json.dumps(STATUS).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    url = f"http://127.0.0.1:{server.server_port}"
    assert main(["--url", url, "--key-file", str(key), "health"]) == 0
    assert seen == ["Bearer s3cret"]
    server.shutdown()
    server.server_close()
    thread.join(5)
    assert main(["--url", url, "health"]) == 3
    assert main(["--url", "ftp://x", "health"]) == 2
    assert main(["--url", url, "--key-file", str(tmp_path / "none"), "health"]) == 65
    assert "s3cret" not in "".join(capsys.readouterr())
