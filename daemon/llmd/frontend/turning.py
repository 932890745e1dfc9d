"""What an event loop does at ticks, so that it wakes once for all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from llmd.config.server_args import SupervisionArgs
from llmd.observability.pulse import Pulse, next_tick

#: Seconds between two beats of the loop's pulse, at least and at most; between these it is the period of heartbeats, or twice that where it may
#: stand still for much longer.
LEAST_S: Final = 0.25
MOST_S: Final = 0.5
MUCH: Final = 8
#: So much after the tick, when the heartbeat is on its way: the thread that sends it would otherwise wait for the interpreter, or the loop would.
_LATER_S: Final = 0.005


def until_tick(period: float) -> float:
    """Seconds to the next tick."""
    return next_tick(period) - time.monotonic() + _LATER_S


async def beat(pulse: Pulse, supervision: Callable[[], SupervisionArgs]) -> None:
    """Show for as long as the event loop turns that it does. `supervision`: what is configured now."""
    while True:
        pulse.beat()
        args = supervision()
        period = min(max(LEAST_S, args.heartbeat), MOST_S)
        await asyncio.sleep(until_tick(2 * period if args.helper_timeout >= MUCH * period else period))
