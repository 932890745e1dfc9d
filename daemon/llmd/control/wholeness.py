"""Why the daemon is not whole, in the words that status, doctor and top show. A pure function of what control knows and the time.

Each reason has a key that stays while its words, which count seconds, change: so that it is told as an event once.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmd.config.server_args import RestartArgs
from llmd.control.core import Core
from llmd.control.machine import BEFORE_READY
from llmd.control.snapshot import Snapshot
from llmd.control.watchdog import standstill


def reasons(core: Core, now: float) -> dict[str, str]:
    """key -> reason; empty: whole. Before the first readiness and while llmd stops there is nothing to say."""
    if core.machine.state in BEFORE_READY or core.machine.state == "stopping":
        return {}
    helpers = [p.name for p in core.boot.processes if p.role in ("frontend", "detokenizer")]
    ready = {w.name for w in core.table if w.ready}
    found = {f"away {name}": f"{name} is away" for name in helpers if name not in ready}
    found |= {f"blocked {w.name}": f"{w.name} is blocked on {w.blocked_on}" for w in core.table if w.blocked_on}
    supervision = core.boot.args.supervision
    found |= {f"still {w.name}": text for w in core.supervised() if (text := standstill(w, supervision, now))}
    if core.stalled:
        found["stalled"] = "requests wait, none runs"
    if core.snapshot is not None:
        found |= _restarts(core.snapshot, supervision.restart, now - core.snapshot_at)
        if core.snapshot.unwritten_crashes:
            found["crashes"] = "records of crashes cannot be written, the newest are kept in memory: make room, or mend the state directory"
    return found


def _restarts(snapshot: Snapshot, budget: RestartArgs, age: float) -> dict[str, str]:
    """What waits for its restart, and which group is about to use up its budget; `age` of the snapshot in seconds."""
    found = {}
    for view in snapshot.processes:
        if view.backoff_s > age and not view.pid:
            number = f"restart {view.recent_restarts} of {budget.max} within {_span(budget.window)}"
            found[f"waits {view.name}"] = f"{view.name} is started again in {max(1, round(view.backoff_s - age))} s ({number})"
    spent = {_group(p.group, (q.name for q in snapshot.processes if q.group == p.group)): p.recent_restarts for p in snapshot.processes}
    for name, count in spent.items():
        if count and count >= budget.max - 1:
            times = "once" if count == 1 else f"{count} times"
            found[f"budget {name}"] = f"{name} died {times} within {_span(budget.window)}; after {budget.max} restarts the next death ends llmd"
    return found


def _group(group: str, members: Iterable[str]) -> str:
    """What a group is called: its one process, or `frontend`."""
    names = list(members)
    return names[0] if len(names) == 1 else group


def _span(seconds: float) -> str:
    """`10 min`, `90 s`."""
    return f"{seconds / 60:g} min" if seconds >= 60 and seconds % 60 == 0 else f"{seconds:g} s"
