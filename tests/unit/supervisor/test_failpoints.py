"""Failpoints that last until a test is ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd import failpoints
from llmd.errors import UsageError
from tests.daemon import SLOW


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_a_delay_with_a_path_is_one_only_while_there_is_that_file(tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    failpoints.arm(f"a.b=delay(3600s,{brake})")
    failpoints.hit("a.b")
    failpoints.arm(f"a.b=delay(100ms,{brake})")
    brake.touch()
    began = time.monotonic()
    failpoints.hit("a.b")
    assert time.monotonic() - began >= 0.1


def test_a_hold_ends_when_its_file_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    brake = tmp_path / "brake"
    failpoints.arm(f"a.b=hold({brake})")
    failpoints.hit("a.b")
    assert capfd.readouterr().err == ""
    brake.touch()
    held = threading.Thread(target=failpoints.hit, args=("a.b",))
    held.start()
    held.join(0.1)
    assert held.is_alive()
    brake.unlink()
    held.join(10 * SLOW)
    assert not held.is_alive()
    assert capfd.readouterr().err == f"failpoint a.b=hold({brake})\n"


@pytest.mark.parametrize("spec", ["a.b=hold", "a.b=hold()", "a.b=delay", "a.b=delay(,/x)", "a.b=delay(1,/x)"])
def test_what_has_no_time_or_no_path_is_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        failpoints.arm(spec)
