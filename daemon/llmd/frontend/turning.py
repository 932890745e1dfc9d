"""What an event loop does at ticks, so that it wakes once for all of it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from llmd.observability.pulse import Pulse, next_tick

#: Seconds between two beats of the loop's pulse, at least and at most; between these it is the period of heartbeats.
LEAST_S: Final = 0.25
MOST_S: Final = 0.5
#: So much after the tick, when the heartbeat is on its way: the thread that sends it would otherwise wait for the interpreter, or the loop would.
_LATER_S: Final = 0.005


def until_tick(period: float) -> float:
    """Seconds to the next tick."""
    return next_tick(period) - time.monotonic() + _LATER_S


async def beat(pulse: Pulse, heartbeat: float) -> None:
    """Show for as long as the event loop turns that it does. `heartbeat`: the period in which control is told."""
    period = min(max(LEAST_S, heartbeat), MOST_S)
    while True:
        pulse.beat()
        await asyncio.sleep(until_tick(period))
