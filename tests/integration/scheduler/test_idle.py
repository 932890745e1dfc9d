"""Nothing to do costs nothing, and something to do is done at once."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from tests.daemon import SLOW, wait_for
from tests.idle import IdleScheduler


def test_an_idle_scheduler_does_not_turn(tmp_path: Path) -> None:
    with IdleScheduler(tmp_path) as idle:
        idle.wake()
        # The last turn of a busy time is followed by one look at the books, a second later.
        wait_for("the books are checked", lambda: idle.bench.scheduler._audit_at is None and not idle.bench.scheduler._busy, 30)
        time.sleep(0.2)
        turns = idle.turns
        time.sleep(1.0)
        assert idle.turns == turns


def test_a_request_wakes_it_at_once(tmp_path: Path) -> None:
    with IdleScheduler(tmp_path) as idle:
        idle.wake()
        taken = []
        for _ in range(20):
            time.sleep(0.01)
            taken.append(idle.wake())
        assert statistics.median(taken) < 0.02 * SLOW, "a wait that polls would show"
