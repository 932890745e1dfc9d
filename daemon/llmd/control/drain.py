"""Draining: the frontends refuse what is new, finish what they hold, and say how much that is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from llmd.control.asking import tell
from llmd.control.channel import RankReply
from llmd.control.core import Core

#: Seconds between two questions how much is left.
ASK_EVERY = 0.1

INFLIGHT = "llmd_frontend_inflight"


async def drain(core: Core, deadline: float, params: dict[str, Any] | None = None) -> int:
    """Have all frontends drain until they hold nothing, or until `deadline` (monotonic), or until `resume`.

    Returns the requests left."""
    began = time.monotonic()
    core.holding = True
    while True:
        left = await _ask(core, params or {}, began, max(0.1, min(1.0, deadline - time.monotonic())))
        if (left > 0) != (core.left > 0):
            core.report_due.set()
        core.left = left
        if left == 0 or time.monotonic() >= deadline or not core.holding:
            return left
        await asyncio.sleep(min(ASK_EVERY, max(0.0, deadline - time.monotonic())))


async def resume(core: Core) -> list[RankReply]:
    """The frontends take requests again."""
    core.holding, core.left = False, 0
    return await tell(core, core.names("frontend"), "resume", within=5.0)


async def _ask(core: Core, params: dict[str, Any], began: float, within: float) -> int:
    """Requests that the frontends hold; one that does not say counts as one."""
    workers = core.table.role("frontend")
    replies = await core.channel.command(workers, "drain", params, within=within)
    left = 0
    for worker, reply in zip(workers, replies, strict=True):
        if core.table.get(worker.name) is not worker:
            continue  # it died, and what it held with it
        told = reply.data.get("inflight")
        if isinstance(told, int):
            left += told
        elif reply.ok and worker.beat_at > began:
            left += int(worker.totals.gauges.get(INFLIGHT, 0))
        else:
            left += 1
    return left


def unfinished(left: int) -> str:
    """`1 request has not finished`."""
    return "1 request has not finished" if left == 1 else f"{left} requests have not finished"
