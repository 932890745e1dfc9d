"""What happens when: start, warm-up, engine lost and back, processes away, stop. Called at each turn of control's loop.

Each step looks at the table and the snapshot and makes at most the transition they call for; what takes time runs in a task.
The transitions of a reload are its operation's.
"""

from __future__ import annotations

import logging
import os
import time

from llmd.control import wholeness
from llmd.control.core import Core
from llmd.control.drain import drain, unfinished
from llmd.control.machine import BEFORE_READY
from llmd.control.supervisor_client import SupervisorAway
from llmd.control.table import Worker
from llmd.errors import EXIT_GAVE_UP, EXIT_OK
from llmd.observability.process import freeze_gc

log = logging.getLogger("llmd.control")

#: Seconds a replaced control waits for the workers to tell it how things are, and for those of which it does not know whether they have ever been ready.
SETTLE, SETTLE_NEW = 3.0, 0.5

#: Seconds for all to freeze their heaps; nobody's readiness hangs on it.
FREEZE_TIMEOUT = 10.0

#: Seconds for the supervisor to hear that all is up; then it is ready without.
UP_WITHIN = 10.0

#: Seconds until a unit that died while llmd stops is asked for again.
ASK_BACK_AGAIN = 2.0

#: Seconds that frontends get to end the requests left after a drain; the supervisor's own deadline leaves room for it.
LAST_WORDS = 1.0


class Lifecycle:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._warming = False
        self._stop_begun = False
        self._stalled_since: float | None = None
        self._reasons: frozenset[str] = frozenset()
        """Keys of why the daemon is not whole, as last told."""
        self._asked_back: dict[str, float] = {}
        """Unit -> when it was last asked for while llmd stops."""

    def step(self) -> None:
        """Make what the picture calls for happen."""
        core = self._core
        if not core.settled:
            core.settled = self.picture_is_whole()
            if not core.settled:
                return
            log.info("control is back (pid %d), %d processes known", os.getpid(), len(list(core.table)))
        if core.snapshot is not None and core.snapshot.stopping and not self._stop_begun:
            self._stop_begun = True
            core.spawn(self._stop(), "stop")
        state, up = core.machine.state, core.can_generate
        if state in BEFORE_READY and not self._stop_begun:
            self._start()
        elif state == "recovering" and up:
            core.machine.fire("engine_back", f"epoch {core.epoch}")
        elif state in ("ready", "paused", "asleep") and not up:
            core.machine.fire("engine_lost", self._why_away())
        self._redrain()
        self._bring_back()
        self._look_for_stall()
        self._note_degraded(wholeness.reasons(core, time.monotonic()))

    # ------------------------------------------------------------ start

    def picture_is_whole(self) -> bool:
        """Whether a control that replaces another knows how things are, or has waited long enough."""
        core = self._core
        waited = time.monotonic() - core.started
        if waited > SETTLE:
            return True
        if core.snapshot is None:
            return False
        for view in core.snapshot.processes:
            worker = core.table.get(view.name)
            if waited > SETTLE_NEW and core.remembered.were_ready.get(view.name) != view.incarnation:
                continue  # it started while nobody listened, and may still be importing: nothing of it is lost when it says Hello later
            # A heartbeat follows Hello and Ready, so after one it is known whether the worker is ready.
            if view.role != "control" and view.pid and (worker is None or worker.pid != view.pid or not worker.beat_at):
                return False
        return True

    def _start(self) -> None:
        core = self._core
        core.newly_ready.clear()
        helpers = all(len(core.ready_workers(role)) == core.expected(role) for role in ("frontend", "detokenizer"))
        if core.machine.state == "starting" and core.table.role("scheduler"):
            core.machine.fire("load")
        if core.engine_up and helpers and not self._warming:
            self._warming = True
            core.machine.fire("loaded", f"all processes ready {time.monotonic() - core.started:.1f} s after control began")
            core.spawn(self._warm(), "warm-up")

    async def _warm(self) -> None:
        core = self._core
        began = time.monotonic()
        replies = await core.channel.command(core.table.role("frontend")[:1], "warmup", within=core.boot.args.supervision.startup_timeout)
        if core.machine.state != "warming":
            return
        if not replies or not replies[0].ok:
            await self._fail(f"warm-up failed: {replies[0].message or replies[0].code}" if replies else "warm-up failed: there is no frontend")
            return
        frozen = await core.channel.command(core.table, "freeze", within=FREEZE_TIMEOUT)
        for reply in frozen:
            if not reply.ok:
                log.warning("%s-%d has not frozen its heap: %s", reply.role, reply.rank, reply.message or reply.code)
        freeze_gc()
        # First: a process that dies once somebody has seen that llmd is ready is to be replaced, and requests that came are to be waited for in a stop.
        core.up = True
        await core.reported(UP_WITHIN)
        if core.machine.state == "warming":
            core.machine.fire("warm", f"warm-up took {time.monotonic() - began:.1f} s")

    async def _fail(self, why: str) -> None:
        await self._core.reported()
        if self._core.stopping or self._core.machine.state != "warming":  # the answer to a report may be the first that is heard of a stop
            return
        log.error("%s", why)
        self._core.machine.fire("fail", why)
        await self._core.supervisor.give_up(EXIT_GAVE_UP, why)

    # ------------------------------------------------------------ while it runs

    def _why_away(self) -> str:
        """Which process took the engine or the detokenizer away, and how."""
        core = self._core
        names = [p.name for p in core.boot.processes if p.role in ("scheduler", "detokenizer")]
        if core.snapshot is not None:
            for view in core.snapshot.processes:
                if view.name in names and view.last_exit is not None and core.table.get(view.name) is None:
                    return f"{view.name} {view.last_exit.text}"
        away = [name for name in names if not _is_ready(core.table.get(name))]
        return f"{', '.join(away)} restarts" if away else "the engine restarts"

    def _note_degraded(self, now: dict[str, str]) -> None:
        """Keep why the daemon is not whole, and tell when that changes; seconds that go by are no change."""
        core = self._core
        for key, reason in now.items():
            if key not in self._reasons:
                core.events.emit("degraded", f"degraded: {reason}", severity="warning", reason=reason)
        if self._reasons and not now:
            core.events.emit("degraded", "whole again")
        self._reasons = frozenset(now)
        core.degraded = tuple(now.values())

    def _redrain(self) -> None:
        """A frontend that comes up while others drain drains too."""
        core = self._core
        fresh = [w for w in core.newly_ready if w.role == "frontend"]
        core.newly_ready.clear()
        if fresh and core.holding:
            core.spawn(self._send_drain(fresh), "drain of a new frontend")

    def _bring_back(self) -> None:
        """While llmd stops, nothing comes back by itself; but clients still wait for what the engine and the detokenizer owe them."""
        core = self._core
        if not self._stop_begun or core.snapshot is None or core.machine.state == "stopping" or not core.inflight:
            return
        now = time.monotonic()
        for view in core.snapshot.processes:
            if view.role not in ("scheduler", "detokenizer") or view.pid or view.state != "exited":
                continue
            unit = "engine" if view.group == "engine" else view.name
            if now - self._asked_back.get(unit, -ASK_BACK_AGAIN) >= ASK_BACK_AGAIN:
                self._asked_back[unit] = now
                core.spawn(self._ask_back(unit), f"return of {unit}")

    async def _ask_back(self, unit: str) -> None:
        log.warning("%s has died while requests are in flight: it is started once more for them", unit)
        try:
            await self._core.supervisor.restart(unit, "requests are in flight")
        except SupervisorAway as error:
            log.warning("%s is not started again: %s", unit, error)

    async def _send_drain(self, workers: list[Worker]) -> None:
        await self._core.channel.command(workers, "drain", within=5.0)

    def _look_for_stall(self) -> None:
        core = self._core
        waiting = core.gauge("llmd_requests_waiting") or 0
        if not waiting:
            self._stalled_since, core.stalled = None, False
            return
        running = core.gauge("llmd_requests_running") or 0
        free, cached, active = (core.gauge(f'llmd_kv_pages{{state="{state}"}}') for state in ("free", "cached", "active"))
        now = time.monotonic()
        if not running and core.engine_up and (free is None or free + (cached or 0) > 0):
            self._stalled_since = self._stalled_since or now
        else:
            self._stalled_since = None
        stalled = self._stalled_since is not None and now - self._stalled_since > core.boot.args.supervision.stall_alarm
        if stalled and not core.stalled:
            ranks = ", ".join(f"{w.name} {w.phase} for {w.step_age_s:.1f} s after {w.steps} steps" for w in core.table.role("scheduler"))
            log.error(
                "the engine is stalled: %d requests wait, none has run for %.0f s; KV pages free %s, cached %s, active %s; %s",
                int(waiting),
                now - (self._stalled_since or now),
                *("?" if count is None else int(count) for count in (free, cached, active)),
                ranks,
            )
        core.stalled = stalled

    # ------------------------------------------------------------ stop

    async def _stop(self) -> None:
        core = self._core
        if core.machine.state not in BEFORE_READY and core.machine.state != "failed":
            if core.machine.can("drain"):
                core.machine.fire("drain", "stopping")
            left = await drain(core, self._drain_deadline(), {"stopping": True})
            if left:
                log.warning("%s within the drain", unfinished(left))
                await core.channel.command(core.table.role("frontend"), "shutting_down", within=LAST_WORDS)
        if core.machine.can("stop"):
            core.machine.fire("stop", "asked to")
        await self._shutdown("stopped as asked")

    def _drain_deadline(self) -> float:
        core = self._core
        left = core.boot.args.http.drain_timeout
        if core.snapshot is not None and core.snapshot.drain_left_s is not None:
            left = min(left, core.snapshot.drain_left_s)
        return time.monotonic() + max(0.0, left)

    async def _shutdown(self, why: str) -> None:
        try:
            await self._core.supervisor.shutdown(EXIT_OK, why)
        except SupervisorAway as error:
            # The supervisor has the same deadline and ends the daemon itself.
            log.warning("cannot tell the supervisor that the drain is over: %s", error)


def _is_ready(worker: Worker | None) -> bool:
    return worker is not None and worker.ready
