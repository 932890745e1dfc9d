"""llmctl against an admin plane on a unix socket: answers, exit statuses, and what it says when nobody answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmctl.main import main
from tests.daemon import SLOW, least
from tests.integration.llmctl.fake import STATUS, Fake, process_named_llmd, serving


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with serving(tmp_path) as served:
        yield served


def ctl(place: Fake | Path, *argv: str) -> int:
    return main(["--socket", str(place.run_dir if isinstance(place, Fake) else place), *argv])


def operation(verb: str, **data: Any) -> dict[str, Any]:
    return {
        "id": "op-1",
        "verb": verb,
        "state": "succeeded",
        "results": [{"role": "scheduler", "rank": 0, "answered": True, "ok": True, "data": {}}],
        "data": data,
    }


def refusal(message: str, code: str | None, param: str | None = None, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": param, "code": code, "hint": "try later", "operation_id": None}, **more}


# ------------------------------------------------------------ reading


def test_status_as_a_table(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(fake, "status") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines() == [
        "state     ready",
        "model     smollm2-135m-instruct  (weights model.gguf@0123456789ab)",
        "address   http://127.0.0.1:8000",
        "uptime    2h 5m, engine epoch 1",
        "requests  2 running, 0 waiting; 12.5 tokens/s out, 10.0 in",
        "kv cache  [#####---------------] 25 of 100 pages (20 active, 5 cached)",
        "",
        "ROLE        RANK  PID  STATE  RESTARTS  UPTIME   MEMORY  LAST EXIT",
        "supervisor     0   11  ready         0   2h 5m   27 MiB  -",
        "scheduler      0   12  busy          1   4m 0s  700 MiB  killed by SIGKILL, 4m 10s ago (hang)",
    ]


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_status_for_programs(fake: Fake, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(fake, "status", "-o", form) == 0
    assert yaml.safe_load(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize("verb", ["status", "health"])
@pytest.mark.parametrize("state", ["starting", "loading", "warming", "recovering", "reloading", "draining", "stopping", "failed"])
def test_up_but_not_ready_is_1(fake: Fake, verb: str, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/status"] = (200, STATUS | {"state": state, "stage": "weights", "progress": 0.4})
    assert ctl(fake, verb, "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert ctl(fake, verb) == 1
    assert state in capsys.readouterr().out


def test_ps_kv_version(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(fake, "ps", "-o", "wide") == 0
    assert "HEARTBEAT" in capsys.readouterr().out
    assert ctl(fake, "kv") == 0
    assert "active     20     320  [####" in capsys.readouterr().out
    assert ctl(fake, "version", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"llmctl": "0.1.0", "llmd": "0.1.0"}


# ------------------------------------------------------------ nobody answers


def test_not_running_says_where_it_looked_and_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(tmp_path, "flush") == 3
    shown = capsys.readouterr()
    assert shown.out == "" and str(tmp_path / "admin.sock") in shown.err and "start it with" in shown.err
    assert ctl(tmp_path, "status", "-o", "json") == 3
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["running"], answer["looked_at"]) == ("stopped", False, [str(tmp_path / "admin.sock")])


def test_not_running_shows_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llmd.lock").write_text(json.dumps({"pid": 2**22 + 1, "start_id": "abc", "version": "0.1.0"}))
    (tmp_path / "state.json").write_text(json.dumps({"state": "failed", "stage": "", "reason": "crash budget spent", "at": 1.0}))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "admin.sock"))
    assert ctl(tmp_path, "status", "-o", "json") == 3
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["state"], answer["last_state"], answer["reason"], answer["pid"]) == ("failed", "failed", "crash budget spent", 2**22 + 1)
    assert 0 <= answer["last_state_age_s"] < 60
    assert "crash budget spent" in shown.err
    assert set(STATUS) - {"progress"} <= set(answer), "the same keys as when it runs"


def test_a_daemon_without_control_is_not_answering(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process_named_llmd() as process:
        (tmp_path / "llmd.lock").write_text(json.dumps({"pid": process.pid}))
        (tmp_path / "state.json").write_text(json.dumps({"state": "ready"}))
        assert ctl(tmp_path, "health", "-o", "json") == 4
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["running"], answer["answering"], answer["pid"]) == ("ready", True, False, process.pid)


@pytest.mark.parametrize("left", [None, {"state": "stopped", "at": 50.0}, {"state": "starting", "at": 101.0}])
def test_a_daemon_that_has_no_control_yet_is_starting(tmp_path: Path, left: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]) -> None:
    with process_named_llmd() as process:
        (tmp_path / "llmd.lock").write_text(json.dumps({"pid": process.pid, "started_at": 100.0}))
        if left is not None:
            (tmp_path / "state.json").write_text(json.dumps(left))
        assert ctl(tmp_path, "status", "-o", "json") == 1
        answer = json.loads(capsys.readouterr().out)
        assert (answer["state"], answer["running"], answer["answering"]) == ("starting", True, False)
        assert ctl(tmp_path, "health") == 1
        assert capsys.readouterr().out == "starting\n"


@pytest.mark.parametrize(("last", "state"), [("ready", "died"), ("starting", "died"), ("stopped", "stopped"), ("failed", "failed")])
def test_what_is_no_more_says_truly_how_it_ended(tmp_path: Path, last: str, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llmd.lock").write_text(json.dumps({"pid": 2**22 + 1, "started_at": 1.0}))
    (tmp_path / "state.json").write_text(json.dumps({"state": last, "reason": "because", "at": 2.0}))
    assert ctl(tmp_path, "status", "-o", "json") == 3
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert ctl(tmp_path, "status") == 3
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("because") == 1, "the reason is said once"
    assert f"{last}, entered" in shown.out


def test_a_silent_daemon_is_not_answering_within_three_seconds(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "admin.sock"))
        silent.listen(5)
        assert least(lambda: seconds_of_status(tmp_path), 3.0 * SLOW) <= 3.0 * SLOW


def seconds_of_status(run_dir: Path) -> float:
    """How long it takes to say that llmd does not answer."""
    began = time.monotonic()
    command = [sys.executable, "-m", "llmctl.main", "status", "-o", "json", "--socket", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * SLOW, check=False)
    took = time.monotonic() - began
    assert done.returncode == 4
    assert json.loads(done.stdout)["answering"] is False
    return took


def test_a_connection_that_breaks_is_69(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.drop = True
    assert ctl(fake, "flush") == 69
    assert "lost" in capsys.readouterr().err


def test_a_timeout_is_124(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "admin.sock"))
        silent.listen(5)
        assert ctl(tmp_path, "kv", "--timeout", "100ms") == 124
    assert "within 0.1 s" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() == 0, reason="root may do everything")
def test_a_socket_we_may_not_use_is_77(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    (fake.run_dir / "admin.sock").chmod(0)
    assert ctl(fake, "status") == 77
    assert "llmd-admin" in capsys.readouterr().err


# ------------------------------------------------------------ changes


@pytest.mark.parametrize(
    ("argv", "data", "body", "text"),
    [
        (["flush"], {"pages_freed": 5}, {}, "flushed: 5 pages freed"),
        (["flush", "--timeout", "3s", "--reason", "test"], {"pages_freed": 0}, {"timeout_s": 3.0, "reason": "test"}, "flushed: 0 pages freed"),
        (["drain"], {}, {}, "draining: new requests are refused; `llmctl resume` ends it"),
        (["drain", "--timeout", "1min"], {"left": 0}, {"timeout_s": 60.0}, "drained: nothing runs; `llmctl resume` ends it"),
        (["resume"], {}, {}, "resumed: requests are taken again"),
        (["abort", "cmpl-1"], {"aborted": ["cmpl-1"]}, {"rid": "cmpl-1"}, "aborted: 1 request"),
        (["abort", "--client-id", "x"], {"aborted": ["a", "b"]}, {"client_id": "x"}, "aborted: 2 requests"),
        (["abort", "--all"], {"aborted": []}, {"all": True}, "aborted: 0 requests"),
        (["restart"], {"epoch": 2}, {}, "restarted: engine epoch 2"),
        (["stop", "--no-wait"], {"stopping": True}, {}, "stopping"),
    ],
)
def test_changes(fake: Fake, argv: list[str], data: dict[str, Any], body: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers[f"/v1/{argv[0]}"] = (200, operation(argv[0], **data))
    assert ctl(fake, *argv) == 0
    assert fake.seen == [("POST", f"/v1/{argv[0]}", body)]
    assert capsys.readouterr().out == text + "\n"
    assert ctl(fake, *argv, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "op-1"


@pytest.mark.parametrize(
    ("status", "reply", "code"),
    [
        (409, refusal("requests are in work", "busy"), 75),
        (409, refusal("operation op-2 flushes already", "flush_in_progress"), 75),
        (409, refusal("requests are still in work", "timeout"), 124),
        (409, refusal("they do not fit", "incompatible_weights"), 65),
        (400, refusal("timeout_s: not a number", None, "timeout_s"), 65),
        (401, refusal("no key", "invalid_api_key"), 77),
        (403, refusal("outside", "forbidden"), 77),
        (404, {"detail": "Not Found"}, 1),
        (500, refusal("internal error", "internal_error"), 1),
        (503, refusal("the engine is away", "engine_unavailable"), 1),
        (504, refusal("too slow", "request_timeout"), 124),
        (409, refusal("the new engine failed", "timeout", operation={"id": "op-1", "state": "rolled_back"}), 1),
        (200, b"<html>", 69),
    ],
)
def test_what_is_refused_or_fails(fake: Fake, status: int, reply: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/flush"] = (status, reply)
    assert ctl(fake, "flush") == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("llmctl: ")


@pytest.mark.parametrize("state", ["partial", "failed", "rolled_back"])
def test_partial_is_never_success(fake: Fake, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = operation("flush") | {"state": state, "results": [{"role": "scheduler", "rank": 1, "answered": False, "ok": False, "message": "no answer"}]}
    fake.answers["/v1/flush"] = (200, record)
    assert ctl(fake, "flush") == 1
    assert "scheduler-1  failed no answer" in capsys.readouterr().out


def test_a_refusals_record_is_data(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/flush"] = (409, refusal("busy", "busy"))
    assert ctl(fake, "flush", "-o", "json") == 75
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "busy"


def test_reload_of_weights(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.gguf").touch()
    fake.answers["/v1/reload"] = (200, operation("reload", weights_version="v2", epoch=2))
    assert ctl(fake, "reload", "weights", "new.gguf", "--version", "v2", "--mode", "abort") == 0
    assert fake.seen == [("POST", "/v1/reload", {"path": str(tmp_path / "new.gguf"), "mode": "abort", "version": "v2"})]
    assert capsys.readouterr().out == "reloaded: weights v2, engine epoch 2\n"
    assert ctl(fake, "reload", "weights", "none.gguf") == 65
    assert ctl(fake, "reload", "weights") == 2
    assert ctl(fake, "reload", "config", "x") == 2
    capsys.readouterr()
    fake.answers["/v1/config/reload"] = (200, operation("config/reload", changed=["http.keep_alive"]))
    assert ctl(fake, "reload") == ctl(fake, "config", "reload") == 0
    assert capsys.readouterr().out == "reloaded: 1 key changed: http.keep_alive\n" * 2


def test_stop_waits_for_the_end(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/stop"] = (200, operation("stop"))
    with process_named_llmd() as process:
        (fake.run_dir / "llmd.lock").write_text(json.dumps({"pid": process.pid}))
        assert ctl(fake, "stop", "--timeout", "300ms") == 124
        assert "has ended" in capsys.readouterr().err
        assert process.stdin is not None
        end = threading.Timer(0.5, process.stdin.close)  # while `stop` waits
        end.start()
        assert ctl(fake, "stop", "--timeout", "10s") == 0
        end.join()
        assert capsys.readouterr().out == f"stopped (pid {process.pid})\n"


# ------------------------------------------------------------ logs


def test_logs_are_merged_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "control-0.log").write_text(
        '{"ts": "2026-01-01T00:00:01.000Z", "level": "info", "role": "control-0", "pid": 1, "logger": "x", "msg": "one", "epoch": 3}\n'
        '{"ts": "2026-01-01T00:00:03.000Z", "level": "error", "role": "control-0", "pid": 1, "logger": "x", "msg": "three\x1b[2J"}\n'.replace("\x1b", "\\u001b")
    )
    (log / "scheduler-0.log").write_text("2026-01-01T00:00:02.000Z INFO    scheduler-0: two\nTraceback of two\n")
    (tmp_path / "llmd.lock").write_text(json.dumps({"pid": 1, "log_dir": str(log)}))
    assert ctl(tmp_path, "logs") == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-01-01T00:00:01.000Z INFO    control-0: one epoch=3",
        "2026-01-01T00:00:02.000Z INFO    scheduler-0: two",
        "Traceback of two",
        "2026-01-01T00:00:03.000Z ERROR   control-0: three [2J",
    ]
    assert ctl(tmp_path, "logs", "-n", "1", "-o", "json", "--dir", str(log), "control-0") == 0
    assert json.loads(capsys.readouterr().out)["msg"] == "three\x1b[2J"
    assert ctl(tmp_path, "logs", "-n", "1", "scheduler") == 0
    assert capsys.readouterr().out.splitlines() == ["Traceback of two"]
    assert ctl(tmp_path, "logs", "nobody") == 1
    assert "control-0, scheduler-0" in capsys.readouterr().err


def test_the_logs_of_another_daemon_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "state" / "llmd" / "log"
    other.mkdir(parents=True)
    (other / "control-0.log").write_text("of another\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "llmd.lock").write_text(json.dumps({"pid": 1}))
    assert ctl(tmp_path, "logs") == 4
    said = capsys.readouterr()
    assert (said.out, "does not say where its logs are" in said.err) == ("", True)


def test_logs_can_be_followed(tmp_path: Path) -> None:
    file = tmp_path / "control-0.log"
    file.write_text("old\n")
    command = [sys.executable, "-u", "-m", "llmctl.main", "logs", "-f", "--dir", str(tmp_path), "--socket", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "old\n"
            with file.open("a") as stream:
                stream.write("new\nhalf")
            assert process.stdout.readline() == "new\n"
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.parametrize("argv", [["abort", ""], ["abort", "--client-id", ""]])
def test_an_empty_id_aborts_nothing(fake: Fake, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(fake, *argv) == 65
    assert "an empty id aborts nothing" in capsys.readouterr().err and fake.seen == []
