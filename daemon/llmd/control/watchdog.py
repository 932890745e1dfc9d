"""Who hangs, and why: a pure function over the table, the supervisor's snapshot, the limits and the time. Killing is the caller's.

Heartbeats come from a thread of their own, so they go on while a worker loads or computes; what counts against a worker is
silence, or one step that never ends. A worker that is `blocked on` another one is not the one that stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from llmd.config.server_args import SupervisionArgs
from llmd.control.snapshot import Snapshot
from llmd.control.table import Worker

#: Seconds of silence that any process may take while it starts: an import can hold the interpreter that long on a busy machine.
START_SILENCE = 30.0
#: The same for the first word of a detokenizer or frontend that replaces another: it loads little, and requests are held for it.
HELPER_START_SILENCE = 10.0


class Verdict(Struct, frozen=True):
    """`name` (with `pid`) has stopped."""

    name: str
    role: str
    pid: int
    reason: str


def judge(
    workers: Iterable[Worker], snapshot: Snapshot | None, limits: SupervisionArgs, now: float, control_since: float, were_ready: Mapping[str, int]
) -> list[Verdict]:
    """The processes to kill now. `control_since`: when this control began to listen; `were_ready`: process -> the incarnation that was ready once."""
    workers = list(workers)
    verdicts = [v for w in workers if (v := _silent(w, limits, now) or _no_progress(w, limits, now))]
    stopped = {v.role for v in verdicts}
    # A rank waits inside its step for a rank that has stopped: name only the latter.
    verdicts += [v for w in workers if w.role not in stopped and (v := _endless_step(w, limits, now))]
    if snapshot is not None:
        verdicts += _never_heard(workers, snapshot, limits, now, control_since, were_ready)
    return verdicts


def limit_of(role: str, limits: SupervisionArgs) -> float:
    """Seconds of silence, or of one step, that a role may take."""
    return limits.hang_timeout if role == "scheduler" else limits.helper_timeout


def standstill(worker: Worker, limits: SupervisionArgs, now: float) -> str:
    """What a ready worker that says nothing, or ends no step, for half its limit is said to do; empty: it gets on."""
    limit = limit_of(worker.role, limits)
    silence, step = now - worker.heard_at, worker.step_age_s
    if not worker.ready or worker.blocked_on or max(silence, step) <= limit / 2:
        return ""
    does = f"has said nothing for {silence:.0f} s" if silence >= step else f"is in one step ({worker.phase}) for {step:.0f} s"
    return f"{worker.name} {does}; it is ended at {limit:g} s"


def _silent(worker: Worker, limits: SupervisionArgs, now: float) -> Verdict | None:
    limit = limit_of(worker.role, limits) if worker.ready else min(limits.startup_timeout, max(limits.hang_timeout, START_SILENCE))
    silence = now - worker.heard_at
    return _verdict(worker, f"no heartbeat for {silence:.1f} s") if silence > limit else None


def _no_progress(worker: Worker, limits: SupervisionArgs, now: float) -> Verdict | None:
    still = now - worker.progress_at
    if worker.ready or still <= limits.startup_timeout:
        return None
    return _verdict(worker, f"no progress in stage {worker.stage!r} for {still:.1f} s")


def _endless_step(worker: Worker, limits: SupervisionArgs, now: float) -> Verdict | None:
    if not worker.ready or worker.blocked_on or worker.step_age_s == 0.0:
        return None
    age = worker.step_age_s
    return _verdict(worker, f"in one step ({worker.phase}) for {age:.1f} s") if age > limit_of(worker.role, limits) else None


def _never_heard(
    workers: list[Worker], snapshot: Snapshot, limits: SupervisionArgs, now: float, control_since: float, were_ready: Mapping[str, int]
) -> list[Verdict]:
    known = {(w.name, w.pid) for w in workers}
    listening = now - control_since
    verdicts = []
    for view in snapshot.processes:
        if view.role == "control" or not view.pid or view.state not in ("starting", "running") or (view.name, view.pid) in known:
            continue
        if any(w.name == view.name and w.incarnation > view.incarnation for w in workers):
            continue
        # One that was ready before this control came says Hello within a heartbeat; one that replaces another has its files in memory, and
        # may take an import's time; only a first start may take as long as reading from a cold disk does.
        if were_ready.get(view.name) == view.incarnation:
            limit = limit_of(view.role, limits)
        elif view.incarnation > 1:
            limit = min(limits.startup_timeout, START_SILENCE if view.role == "scheduler" else max(HELPER_START_SILENCE, limits.helper_timeout))
        else:
            limit = limits.startup_timeout
        waited = min(view.uptime_s, listening)
        if waited > limit:
            verdicts.append(Verdict(view.name, view.role, view.pid, f"has not said a word for {waited:.1f} s"))
    return verdicts


def _verdict(worker: Worker, reason: str) -> Verdict:
    return Verdict(worker.name, worker.role, worker.pid, reason)
