"""How often an event loop shows that it turns."""

from __future__ import annotations

import asyncio

import pytest

from llmd.config.server_args import SupervisionArgs
from llmd.frontend import turning
from llmd.observability.pulse import Pulse


@pytest.mark.parametrize(
    ("heartbeat", "helper_timeout", "period"),
    [(0.5, 5.0, 1.0), (0.5, 1.0, 0.5), (0.5, 3.9, 0.5), (0.1, 5.0, 0.5), (0.1, 1.0, 0.25), (2.0, 30.0, 1.0), (2.0, 4.0, 1.0), (2.0, 3.9, 0.5)],
)
async def test_a_loop_beats_well_within_the_time_that_it_may_stand_still(
    monkeypatch: pytest.MonkeyPatch, heartbeat: float, helper_timeout: float, period: float
) -> None:
    asked: list[float] = []

    def until_tick(seconds: float) -> float:
        asked.append(seconds)
        return 0.0

    monkeypatch.setattr(turning, "until_tick", until_tick)
    pulse, now = Pulse(always=True), [SupervisionArgs(heartbeat=30.0, helper_timeout=0.5)]
    task = asyncio.ensure_future(turning.beat(pulse, lambda: now[0]))
    await asyncio.sleep(0)
    now[0] = SupervisionArgs(heartbeat=heartbeat, helper_timeout=helper_timeout)  # it goes by what is configured now
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    assert asked[-1] == period <= helper_timeout / 2
    assert pulse.steps >= 3
