"""control.state: comes back as written; damaged, foreign or missing, it is ignored."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import msgspec
import pytest

from llmd.control.ledger import Ledger
from llmd.control.state_file import FORMAT, ControlState, StateFile
from llmd.observability.totals import Meter


def full_state() -> ControlState:
    ledger = Ledger()
    meter = Meter()
    meter.inc("llmd_prompt_tokens_total", 7)
    meter.observe("llmd_queue_time_seconds", 0.5)
    ledger.take("frontend-0", 3, meter.snapshot())
    ledger.inc("llmd_operations_total", verb="flush", result="succeeded")
    return ControlState(start_id="s", state="draining", ready_once=True, epoch=4, incarnations={"frontend-0": 3}, ledger=ledger.data, operation={"id": "op-1"})


def write(path: Path, state: ControlState) -> None:
    StateFile(path, state.start_id).write(msgspec.msgpack.encode(state))


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "control.state"
    write(path, full_state())
    assert StateFile(path, "s").load() == full_state()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["control.state"]


def test_a_missing_file_is_no_state(tmp_path: Path) -> None:
    assert StateFile(tmp_path / "control.state", "s").load() is None


def test_a_file_of_another_start_or_format_is_ignored_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "control.state"
    write(path, full_state())
    assert StateFile(path, "another").load() is None
    write(path, msgspec.structs.replace(full_state(), format=FORMAT + 1))
    assert StateFile(path, "s").load() is None
    assert caplog.records == []


def damages() -> list[bytes]:
    data = msgspec.msgpack.encode(full_state())
    return [b"", b"\xc1", b"hello", data[:-1], data[: len(data) // 2], data + b"\0", b"\x81\xa8start_id\x05", bytes(255 - b for b in data), b"\x91" * 100_000]


@pytest.mark.parametrize("number", range(len(damages())))
def test_a_damaged_file_is_ignored_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int) -> None:
    path = tmp_path / "control.state"
    path.write_bytes(damages()[number])
    assert StateFile(path, "s").load() is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "control.state" in caplog.text


def test_an_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "control.state"
    file, data = StateFile(path, "s"), msgspec.msgpack.encode(full_state())
    file.write(data)
    inode = path.stat().st_ino
    file.write(data)
    assert path.stat().st_ino == inode
