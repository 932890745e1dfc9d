"""When a control that replaces another has heard enough to say how things are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from llmd.control.lifecycle import SETTLE, SETTLE_NEW, Lifecycle
from llmd.control.snapshot import ProcessView, Snapshot


@pytest.mark.parametrize(
    ("waited", "ready", "heard", "whole"),
    [
        (0.0, 2, True, True),
        (0.0, 2, False, False),
        (SETTLE - 0.5, 2, False, False),
        (SETTLE + 0.5, 2, False, True),
        # Incarnation 2 of it has never been ready, as far as anyone has heard.
        (0.0, 1, False, False),
        (SETTLE_NEW + 0.5, 1, False, True),
    ],
)
def test_it_waits_for_those_that_were_ready_and_hardly_for_those_that_start(waited: float, ready: int, heard: bool, whole: bool) -> None:
    view = ProcessView(name="scheduler-0", role="scheduler", rank=0, group="engine", pid=7, state="running", incarnation=2)
    core: Any = SimpleNamespace(
        started=time.monotonic() - waited,
        snapshot=Snapshot(start_id="x", pid=1, processes=(view,)),
        table={"scheduler-0": SimpleNamespace(pid=7, beat_at=1.0)} if heard else {},
        remembered=SimpleNamespace(were_ready={"scheduler-0": ready}),
    )
    assert Lifecycle(core).picture_is_whole() is whole
