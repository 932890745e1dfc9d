"""Waiting for a new engine, and noticing that it does not come."""

from __future__ import annotations

import time

from llmd.control.channel import RankReply
from llmd.control.core import Core
from llmd.control.operation import stopped
from llmd.control.snapshot import WANTED_EXITS, ProcessView


async def await_recovery(core: Core, before: int, deadline: float) -> str:
    """Wait until an engine newer than epoch `before` is up, however often it has to be started. Empty when it is, else why it is not."""
    began = time.monotonic()
    if await core.until(lambda: core.stopping or _is_up(core, before), deadline):
        return "" if _is_up(core, before) else "llmd stops"
    return f"not ready within {deadline - began:.0f} s"


async def await_engine(core: Core, before: int, deadline: float) -> str:
    """Wait until the engine that was started after epoch `before` is up. Empty when it is, else why it is not; its first death is the end of the wait.

    While llmd stops, requests in flight may still wait for that engine; once none does, this raises RequestError."""
    began = time.monotonic()
    fault = ""

    def over() -> bool:
        nonlocal fault
        fault = _fault(core, before, began)
        return bool(fault) or _is_up(core, before) or core.machine.state == "stopping"

    if not await core.until(over, deadline):
        return f"not ready within {deadline - began:.0f} s"
    if not fault and not _is_up(core, before):
        raise stopped()
    return fault


def engine_results(core: Core) -> list[RankReply]:
    """One result a rank: whether it is ready in the engine's epoch."""
    epoch, results = core.epoch, []
    for spec in core.boot.processes:
        if spec.role == "scheduler":
            worker = core.table.get(spec.name)
            ok = worker is not None and worker.ready and worker.epoch == epoch
            why = "" if ok else core.why_not_ready(spec.name)
            results.append(RankReply(role=spec.role, rank=spec.rank, answered=worker is not None, ok=ok, message=why))
    return results


def _is_up(core: Core, before: int) -> bool:
    return core.epoch > before and core.engine_up


def _fault(core: Core, before: int, began: float) -> str:
    """Why the engine that was started since `began` has failed; empty: it has not."""
    snapshot = core.snapshot
    if snapshot is None or snapshot.epoch <= before:
        return ""
    age = time.monotonic() - core.snapshot_at
    for view in snapshot.processes:
        end = view.last_exit
        if view.role != "scheduler" or end is None or end.reason in WANTED_EXITS or end.age_s + age > time.monotonic() - began:
            continue
        return _ended(view)
    return f"it was started again as epoch {snapshot.epoch}" if snapshot.epoch > before + 1 else ""


def last_deaths(core: Core) -> str:
    """How the ranks ended that were not meant to, in words; empty: none did."""
    views = core.snapshot.processes if core.snapshot is not None else ()
    ends = [_ended(view) for view in views if view.role == "scheduler" and view.last_exit is not None and view.last_exit.reason not in WANTED_EXITS]
    return ", ".join(ends)


def _ended(view: ProcessView) -> str:
    end = view.last_exit
    assert end is not None, "the caller has seen it"
    last = end.stderr.strip().splitlines()
    return f"{view.name} {end.text}{f': {last[-1]}' if last else ''}"
