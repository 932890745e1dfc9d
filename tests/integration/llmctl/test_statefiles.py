"""What llmctl reads from the state directory when llmd is not running."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.llmctl.fake import STATUS, serving
from tests.integration.llmctl.test_reading import ctl

LINE = {"ts": "2026-01-01T00:00:00Z", "uid": 0, "verb": "flush", "params": {}, "reason": "nightly", "result": "succeeded", "code": None}


def crash(number: int) -> dict[str, object]:
    return {"id": f"2026010{number}T000000-scheduler-0", "at": 1767225600.0, "process": "scheduler-0", "how": "SIGKILL", "why": "", "uptime_s": 3.0}


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run directory whose daemon has ended, with a state directory."""
    state = tmp_path / "state"
    (state / "crashes").mkdir(parents=True)
    for number in (1, 2):
        (state / "crashes" / f"{number}.json").write_text(json.dumps(crash(number)))
    (state / "crashes" / "3.json").write_text("{half")
    (state / "audit.jsonl.1").write_text(json.dumps(LINE | {"verb": "drain"}) + "\n")
    (state / "audit.jsonl").write_text("".join(json.dumps(LINE | {"verb": verb}) + "\n" for verb in ("flush", "restart")))
    run = tmp_path / "run"
    run.mkdir()
    (run / "llmd.lock").write_text(json.dumps({"pid": 0, "state_dir": str(state)}))
    return run


def test_crashes_and_audit_are_read_from_disk_when_llmd_is_down(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(left, "crashes", "-o", "json") == 0
    shown = capsys.readouterr()
    assert [record["id"][:8] for record in json.loads(shown.out)] == ["20260102", "20260101"]
    assert "not running" in shown.err and str(left.parent / "state" / "crashes") in shown.err
    assert ctl(left, "crashes", "20260101") == 0
    assert "scheduler-0" in capsys.readouterr().out
    assert ctl(left, "audit", "-o", "json") == 0
    assert [line["verb"] for line in json.loads(capsys.readouterr().out)] == ["restart", "flush", "drain"]
    assert ctl(left, "audit", "-n", "1", "-o", "json") == 0
    assert [line["verb"] for line in json.loads(capsys.readouterr().out)] == ["restart"]


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd starts it, with the unit's file")
@pytest.mark.parametrize(("file", "command"), [("/etc/my llmd.yaml", "llmd run -c '/etc/my llmd.yaml'"), (None, "llmd run")])
def test_the_hint_names_the_file_of_the_last_start(left: Path, file: str | None, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lock = left / "llmd.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"config": {"file": file}}))
    (left / "admin.sock").touch()
    assert ctl(left, "health") == 3
    assert f"start it with `{command}`" in capsys.readouterr().err


def test_a_running_daemon_is_asked_and_its_files_are_not_read(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(left) as fake:
        fake.answers["/v1/crashes"] = (200, {"crashes": []})
        assert ctl(left, "crashes", "-o", "json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [] and "not running" not in shown.err


@pytest.mark.parametrize(("verb", "file"), [("crashes", "crashes"), ("audit", "audit.jsonl")])
def test_where_nothing_is_left_the_paths_are_named(
    verb: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llmd.lock").write_text(json.dumps({"pid": 0, "state_dir": str(tmp_path / "none")}))
    assert ctl(tmp_path, verb) == 3
    assert str(tmp_path / "none" / file) in capsys.readouterr().err
    (tmp_path / "llmd.lock").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "llmd" / "crashes").mkdir(parents=True)
    (tmp_path / "home" / "llmd" / "audit.jsonl").touch()
    assert ctl(tmp_path, verb) == 0, "the usual places are looked at where no daemon has said its own"
    assert str(tmp_path / "home" / "llmd" / file) in capsys.readouterr().err


def test_events_say_what_is_left_of_them(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(left, "events") == 3
    assert "llmctl crashes" in capsys.readouterr().err


def test_a_report_of_a_daemon_that_is_down_holds_its_files(left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "down.tar.gz"
    assert ctl(left, "report", "--output-file", str(file)) == 0
    with tarfile.open(file) as archive:
        read = {member.name.rpartition("/")[2]: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert [record["id"][:8] for record in json.loads(read["crashes.json"])["crashes"]] == ["20260102", "20260101"]
    assert [line["verb"] for line in json.loads(read["audit.json"])["audit"]] == ["restart", "flush", "drain"]
    assert "error" in json.loads(read["status.json"])
    capsys.readouterr()


@pytest.mark.parametrize(("ages", "text"), [((60, 7200), "1 crash within"), ((60, 600, 7200), "2 crashes within"), ((7200,), None)])
def test_doctor_counts_the_crashes_of_the_last_hour(left: Path, ages: tuple[int, ...], text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    directory = left.parent / "state" / "crashes"
    for path in directory.glob("*.json"):
        path.unlink()
    for number, age in enumerate(ages):
        (directory / f"{number}.json").write_text(json.dumps(crash(number) | {"at": time.time() - age}))
    ctl(left, "doctor", "-o", "json")
    found = [finding for finding in json.loads(capsys.readouterr().out) if finding["what"] == "crashes"]
    assert [(each["state"], each["hint"]) for each in found] == ([("warning", "llmctl crashes")] if text else [])
    assert text is None or (found[0]["text"].startswith(text) and "scheduler-0" in found[0]["text"])


def test_doctor_says_that_a_disk_is_full(left: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1, used=1, free=0))
    assert ctl(left, "doctor", "-o", "json") == 1
    disk = next(f for f in json.loads(capsys.readouterr().out) if f["what"] == "disk")
    assert disk["state"] == "wrong" and disk["text"].startswith("nothing free for logs in ")


def test_doctor_says_what_ends_draining(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(left) as fake:
        fake.answers["/v1/status"] = (200, STATUS | {"state": "draining"})
        fake.answers["/v1/crashes"] = (200, {"crashes": [crash(1) | {"at": time.time()}]})
        ctl(left, "doctor", "-o", "json")
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["daemon"]["hint"] == "llmctl resume"
    assert findings["crashes"]["text"].startswith("1 crash ")


def test_doctor_names_a_process_that_stands_still(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalled = {**STATUS["processes"][1], "state": "stalled", "heartbeat_age_s": 8.0}
    with serving(left) as fake:
        fake.answers["/v1/status"] = (200, STATUS | {"processes": [STATUS["processes"][0], stalled]})
        ctl(left, "doctor", "-o", "json")
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["scheduler-0"]["state"] == "warning" and findings["scheduler-0"]["text"].startswith("stalled, last heard 8.0s ago")
