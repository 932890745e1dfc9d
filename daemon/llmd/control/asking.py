"""Commands to all processes of a kind, of which any may be dying or on its way back: always one result for each process of the plan."""

from __future__ import annotations

import time
from typing import Any

from llmd.control.channel import RankReply
from llmd.control.core import Core
from llmd.control.table import Worker

#: Seconds until the supervisor has told of the death of a process that could not be reached.
DEATH_IS_KNOWN = 1.0


async def tell(core: Core, names: list[str], verb: str, params: dict[str, Any] | None = None, *, within: float) -> list[RankReply]:
    """Tell the processes `names` what any that comes up later goes by without being told: one that is away, or ends meanwhile, has not refused it."""
    asked, replies = await _command(core, names, verb, params, within)

    def alive_and_silent(name: str) -> bool:
        return not replies[name].answered and name in asked and core.table.get(name) is asked[name]

    await core.until(lambda: not any(map(alive_and_silent, names)), time.monotonic() + DEATH_IS_KNOWN)
    return [reply if reply.answered or alive_and_silent(name) else _away(core, name, ok=True) for name, reply in replies.items()]


async def ask(core: Core, role: str, verb: str, params: dict[str, Any] | None = None, *, within: float) -> list[RankReply]:
    """Ask every process of `role`; one that is away shows as not answering."""
    _, replies = await _command(core, core.names(role), verb, params, within)
    return list(replies.values())


async def _command(core: Core, names: list[str], verb: str, params: dict[str, Any] | None, within: float) -> tuple[dict[str, Worker], dict[str, RankReply]]:
    """The workers that were there, and a reply for each of `names`, in their order."""
    there = {name: worker for name in names if (worker := core.table.get(name)) is not None and worker.ready}
    answers = await core.channel.command(there.values(), verb, params, within=within)
    given = dict(zip(there, answers, strict=True))
    return there, {name: given.get(name) or _away(core, name, ok=False) for name in names}


def _away(core: Core, name: str, *, ok: bool) -> RankReply:
    role, _, rank = name.rpartition("-")
    message = f"is away: {core.why_not_ready(name)}"
    return RankReply(role=role, rank=int(rank), answered=False, ok=ok, code=None if ok else "no_answer", message=message)
