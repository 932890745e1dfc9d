"""Control put together: its loops, and the beat that keeps going whatever else happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from llmd.control import listener, watchdog
from llmd.control.core import Core
from llmd.control.history import History
from llmd.control.lifecycle import Lifecycle
from llmd.control.metrics import Metrics
from llmd.control.operations import Operations
from llmd.control.snapshot import Report
from llmd.control.state_file import StateFile
from llmd.control.status import requests
from llmd.control.supervisor_client import SupervisorAway, SupervisorClient
from llmd.observability.pulse import next_tick
from llmd.plan.context import WorkerContext
from llmd.wire.messages import Publish

if TYPE_CHECKING:
    from llmd.control.admin import AdminServer

log = logging.getLogger("llmd.control")

#: Seconds after which a kill that has changed nothing is asked for again.
KILL_AGAIN = 2.0

#: Seconds after which metrics of which only ages have changed are rendered and published again.
RENDER_AGAIN = 5.0

#: Seconds, when control ends, for what runs to end too, and for whoever waits for it to be told.
ENDS_WITHIN, ANSWERED_WITHIN = 2.0, 0.5

#: Share of a heartbeat's period after a tick, at which all send theirs, when control looks at them.
LATER = 0.02


class ControlApp:
    """One control process. `run` returns when SIGTERM or `stop` ends it."""

    def __init__(self, context: WorkerContext, events: BinaryIO | None, supervisor: SupervisorClient | None = None) -> None:
        self._events = events
        self._file = StateFile(context.boot.ports.control_state, context.boot.start_id)
        self.core = Core(context, supervisor or SupervisorClient(context.boot.ports.supervisor_socket, context.boot.ports.reports), self._file.load())
        self._metrics = Metrics(self.core)
        self._lifecycle = Lifecycle(self.core)
        self._history = History(self.core)
        self._told: object = None
        self._rendered_at = 0.0
        self._reported_at = 0.0
        self._saved_at = 0.0
        self._published: Publish | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._write: Future[None] | None = None
        self._killed: dict[tuple[str, int], float] = {}
        self._away = False
        self._broken: set[str] = set()
        self._unwritten = False
        self._stop = asyncio.Event()
        self._hangups = self.core.remembered.hangups
        """SIGHUPs that are being seen to."""
        self._hanging_up = asyncio.Lock()
        self.operations = Operations(self.core, self._save_now)
        self._admin: AdminServer | None = None

    def stop(self) -> None:
        """End this control; the daemon goes on."""
        self._stop.set()

    async def run(self) -> int:
        """Everything, until stopped."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        core = self.core
        if level := core.remembered.log_levels.get("control-0"):
            logging.getLogger().setLevel(level.upper())
        core.channel.bind(core.boot.ports.control)
        if not core.resumed:
            self._admin = self._make_admin()
            self._admin.bind()
        loops = [core.channel.run(), self._beats(), self._reports(), self._serve_admin()]
        if self._events is not None:
            core.spawn(listener.run(self._events, core.report_due.set), "events")
        core.spawn(self._take_up(), "reload taken up")
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            await self._close([stopped, *tasks])
        return 0

    async def _serve_admin(self) -> None:
        """The admin plane, for ever. Its import takes longer than all else, and clients may wait for what a new control tells frontends: that comes first."""
        if self._admin is None:
            await self.core.until(lambda: self.core.settled, math.inf)
            self._admin = await asyncio.get_running_loop().run_in_executor(None, self._make_admin)
            self._admin.bind()
        await self._admin.run()

    def _make_admin(self) -> AdminServer:
        from llmd.control.admin import AdminServer

        return AdminServer(self.core, self.operations, self._history)

    async def _take_up(self) -> None:
        await self.core.until(lambda: self.core.settled, math.inf)
        await self.operations.take_up()

    async def _close(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        await self.operations.end_all(ENDS_WITHIN)
        self.core.events.end()
        if self._admin is not None:
            await self._admin.answered(ANSWERED_WITHIN)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.core.channel.close()
        if self._admin is not None:
            self._admin.close()
        self.core.supervisor.close()
        self._writer.shutdown(wait=True)
        with contextlib.suppress(OSError):
            self._file.write(self.core.encode_state())

    # ------------------------------------------------------------ the beat

    async def _beats(self) -> None:
        """A turn at each change, and one a heartbeat: when everyone's should have come, so that control wakes once for all of them."""
        core = self.core
        period = core.boot.args.supervision.heartbeat
        beat_at = time.monotonic()
        while True:
            await self._turn_due(beat_at)
            news = core.changed.take()
            now = time.monotonic()
            if now >= beat_at:
                if now - beat_at > 2 * period:
                    # Control was stopped or starved: what it has not heard in that time is nobody's fault.
                    core.table.forgive(now - beat_at)
                core.channel.take_datagrams()
                beat_at = next_tick(period) + LATER * period
                self._safely(self._beat)
                if now - self._reported_at > 1.5 * period:  # the next but one: it need not wake for that alone
                    core.report_due.set()
            self._safely(self._lifecycle.step)
            if news:
                self._published = None
            if core.settled:
                self._safely(self._publish)
            if news or now - self._saved_at > 1.5 * period:  # what is no news, as CPU time, waits for the next beat but one
                self._saved_at = now
                self._safely(self._save)
            core.turned()

    async def _turn_due(self, beat_at: float) -> None:
        due = self.core.due
        timer = asyncio.get_running_loop().call_at(beat_at, due.set)
        await due.wait()
        timer.cancel()
        due.clear()

    def _beat(self) -> None:
        core = self.core
        for worker in core.table:
            self._metrics.take(worker)
        self._metrics.take_own()
        counters, now = core.ledger.counters(), time.monotonic()
        self._history.rates.sample(counters, now)
        self._history.beat(now)
        told = counters, [(worker.totals.gauges, worker.rss_bytes >> 20) for worker in core.table], core.shown_state
        if told != self._told or now - self._rendered_at >= RENDER_AGAIN:
            self._told, self._rendered_at = told, now
            core.metrics_text = self._metrics.render()
        self._watch()

    def _publish(self) -> None:
        """To all frontends, unless they have it; at each change anew, since one of them may be."""
        publication = self.core.publication()
        if publication != self._published:
            self._published = publication
            self.core.channel.publish(publication, self.core.table.role("frontend"))

    def _watch(self) -> None:
        core, now = self.core, time.monotonic()
        for verdict in watchdog.judge(core.supervised(), core.snapshot, core.boot.args.supervision, now, core.started, core.remembered.were_ready):
            key = (verdict.name, verdict.pid)
            if now - self._killed.get(key, -KILL_AGAIN) < KILL_AGAIN:
                continue
            if key not in self._killed:
                log.error("%s (pid %d) hangs: %s", verdict.name, verdict.pid, verdict.reason)
                what = f"{verdict.name} (pid {verdict.pid}) hangs: {verdict.reason}"
                core.events.emit("process", what, severity="error", process=verdict.name, pid=verdict.pid, reason="hang")
                core.ledger.inc("llmd_watchdog_kills_total", role=verdict.role)
            self._killed[key] = now
            core.spawn(self._kill(verdict), f"kill of {verdict.name}")

    async def _kill(self, verdict: watchdog.Verdict) -> None:
        try:
            await self.core.supervisor.kill(verdict.name, verdict.pid, verdict.reason)
        except SupervisorAway as error:
            log.warning("cannot have %s killed: %s", verdict.name, error)

    def _safely(self, step: Callable[[], None]) -> None:
        """A fault in one concern must not stop the beat; it is logged once until that concern works again."""
        name = step.__qualname__
        try:
            step()
        except Exception:
            if name not in self._broken:
                log.exception("%s failed", name)
            self._broken.add(name)
        else:
            self._broken.discard(name)

    # ------------------------------------------------------------ supervisor

    async def _reports(self) -> None:
        """Report at each other heartbeat, at each change of state, and at each event: what ends or stops comes as an event at once."""
        core, limits = self.core, self.core.boot.args.supervision
        # The beat asks for one at each other heartbeat: then this wait is not what ends.
        period = min(2.5 * limits.heartbeat, limits.control_timeout / 4)
        while True:
            core.report_due.clear()
            try:
                asked = self._reported_at = time.monotonic()
                core.reports_made += 1
                core.take_snapshot(await core.supervisor.report(self._report()), asked)
                core.report_is_heard()
                self._away = False
                self._see_to_hangups()
            except SupervisorAway as error:
                if not self._away:
                    log.warning("the supervisor does not answer: %s", error)
                self._away = True
            timer = asyncio.get_running_loop().call_later(period, core.report_due.set)
            await core.report_due.wait()
            timer.cancel()

    def _see_to_hangups(self) -> None:
        """Several that came together are one."""
        got = self.core.snapshot.hangups if self.core.snapshot is not None else 0
        if got > self._hangups:
            self._hangups = got
            self.core.spawn(self._on_hangup(got), "SIGHUP")

    async def _on_hangup(self, number: int) -> None:
        """Only what is over has been seen to: a control that replaces this one meanwhile does it again, which changes nothing twice."""
        async with self._hanging_up:
            await self.operations.on_hangup()
            self.core.remembered.hangups = number

    def _report(self) -> Report:
        core = self.core
        stage, progress = core.stage()
        return Report(
            state=core.shown_state,
            stage=stage,
            reason=core.reason,
            status=self._status_text(stage, progress),
            progress=progress if core.never_ready else 0.0,
            progressing=not core.stalled,
            up=core.up,
            ready=core.remembered.ready_once,
            requests=core.inflight,
            phases={worker.name: worker.doing for worker in core.table},
            weights_version=core.boot.files.weights_version,
            reloading=core.reconfiguring,
        )

    def _status_text(self, stage: str, progress: float) -> str:
        core = self.core
        if not core.settled:
            return f"{core.machine.state}; {stage}"  # as the supervisor has said when the one before ended
        counts = requests(core)
        if core.shown_state in ("ready", "draining"):
            extra = f"; {', '.join(core.degraded)}" if core.degraded else ""
            return f"{core.shown_state}: {counts['running']} running, {counts['waiting']} waiting{extra}"
        share = f" {progress:.0%}" if 0 < progress < 1 else ""
        detail = stage or core.reason
        held = f"; {counts['held']} held" if counts["held"] else ""
        return f"{core.shown_state}{f': {detail}' if detail else ''}{share}{held}"

    # ------------------------------------------------------------ state file

    def _save(self) -> None:
        if self._write is not None and not self._write.done():
            return  # the next turn writes what is newest
        if self._write is not None:
            self._say_once(self._write.exception())
        data = self.core.encode_state()
        self._write = None if self._file.holds(data) else self._writer.submit(self._file.write, data)

    def _say_once(self, error: BaseException | None) -> None:
        """One WARNING when the state cannot be written any more, one line when it can again."""
        if error is not None and not self._unwritten:
            log.warning("what a replaced control needs cannot be written, and is tried again at each heartbeat: %s", error)
        elif error is None and self._unwritten:
            log.info("what a replaced control needs is written again")
        self._unwritten = error is not None

    async def _save_now(self) -> None:
        """What is remembered is on disk when this returns. Raises OSError."""
        await asyncio.wrap_future(self._writer.submit(self._file.write, self.core.encode_state()))
