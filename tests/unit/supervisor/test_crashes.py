"""Records of crashes: what stands in them, how many there are, and what a disk that refuses costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmd.control import crashes as reader
from llmd.supervisor import crashes
from llmd.supervisor.crashes import CrashFiles, split_stacks

LINES = [
    "loading",
    "Fatal Python error: Segmentation fault",
    "Thread 0x00007f (most recent call first):",
    '  File "/x/loop.py", line 3 in run',
    "  <no Python frame>",
    "it was going so well",
]


def facts(number: int) -> dict[str, object]:
    return {"process": "scheduler-0", "pid": number, "how": "signal 11 (SIGSEGV)"}


def test_stacks_stand_apart_from_what_was_said() -> None:
    assert split_stacks(LINES) == (LINES[1:5], ["loading", "it was going so well"])


def test_only_the_newest_are_kept_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "MAX_RECORDS", 3)
    files = CrashFiles(tmp_path / "crashes")
    for number in range(6):
        assert files.write(facts(number), LINES, 1_000_000.0 + number)
    found = reader.newest(tmp_path / "crashes", 10)
    assert [record["pid"] for record in found] == [5, 4, 3]
    assert found[0]["stacks"] == LINES[1:5] and found[0]["how"] == "signal 11 (SIGSEGV)" and found[0]["at"] == 1_000_005.0
    assert [record["pid"] for record in reader.newest(tmp_path / "crashes", 1)] == [5]
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "crashes").iterdir()} <= {0o044, 0o040, 0}


def test_records_are_bounded(tmp_path: Path) -> None:
    CrashFiles(tmp_path).write(facts(1), ["x" * 100] * 5000 + ['  File "a"'] * 5000, 0.0)
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert len(record["last_lines"]) == crashes.MAX_LINES and len(record["stacks"]) == crashes.MAX_STACK_LINES


def test_a_disk_that_refuses_costs_the_record_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert CrashFiles(tmp_path / "file").write(facts(1), LINES, 0.0) == ""
    assert "could not be written" in caplog.text
    (tmp_path / "damaged.json").write_text("{")
    assert reader.newest(tmp_path, 5) == [] and reader.newest(tmp_path / "none", 5) == []


def test_what_no_disk_takes_waits_in_memory_until_one_does(tmp_path: Path) -> None:
    block = tmp_path / "crashes"
    block.write_text("")
    files = CrashFiles(block)
    assert files.unwritten(100.0) == []
    for number in range(crashes.MAX_UNWRITTEN + 2):
        assert files.write(facts(number), [*LINES, *["x" * 5000] * 50], 1_000_000.0 + number) == ""
    kept = files.unwritten(200.0)
    assert [record["pid"] for record in kept] == list(range(2, crashes.MAX_UNWRITTEN + 2)) and len(json.dumps(kept)) < 50_000
    shown = reader.newest(block, 3, kept)
    assert [record["pid"] for record in shown] == [6, 5, 4] and shown[0]["how"] == "signal 11 (SIGSEGV)" and shown[0]["stacks"] == LINES[1:5]
    block.unlink()
    assert len(files.unwritten(200.0 + crashes.TRY_AGAIN - 1)) == crashes.MAX_UNWRITTEN
    assert files.unwritten(200.0 + crashes.TRY_AGAIN) == []
    assert [record["pid"] for record in reader.newest(block, 10, kept)] == [6, 5, 4, 3, 2]
