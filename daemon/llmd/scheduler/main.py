"""Entry of the scheduler process: link to control, model, channels, loop. SIGTERM ends it at once with exit status 0."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Literal

import zmq

from llmd import failpoints
from llmd.config.server_args import SchedulerArgs
from llmd.errors import EXIT_OK
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.plan.context import WorkerContext
from llmd.scheduler.arrivals import Limits
from llmd.scheduler.build import Built, build
from llmd.scheduler.commands import Commands
from llmd.scheduler.input import Input
from llmd.scheduler.journal import Journal
from llmd.scheduler.journal import read as read_journal
from llmd.scheduler.loop import Scheduler
from llmd.scheduler.output import Output
from llmd.scheduler.policy import make_queue
from llmd.scheduler.suspects import Suspects
from llmd.scheduler.tables import SchedulerTables
from llmd.wire.link import WorkerLink, hello
from llmd.wire.messages import Totals


def run(context: WorkerContext) -> int:
    """Serve until SIGTERM; returns the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    boot = context.boot
    meter, pulse = Meter(), Pulse()
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    source = Input(context.epoch, meter)
    source.hear_signals()
    gauges, tables = _Gauges(meter), SchedulerTables()
    link = WorkerLink(
        boot.ports.control,
        hello("scheduler", context.rank, context.incarnation, context.epoch),
        heartbeat=boot.args.supervision.heartbeat,
        pulse=pulse,
        totals=gauges.totals,
        tables=tables.tables,
        on_message=source.hand_over,
    )
    link.start()
    output = Output(zmq_context, boot.ports, boot.args.http.workers, context.epoch)
    try:
        built = build(boot, link.progress)
        failpoints.hit("scheduler.ipc")
        source.open(zmq_context, boot.ports)
        scheduler = _scheduler(context, built, source, output, meter, pulse)
        gauges.scheduler = tables.scheduler = scheduler
        link.ready(built.info)
        try:
            scheduler.run(Commands(scheduler, link, lambda args: _limits(context, built, args.scheduler)))
        finally:
            scheduler.close()
    finally:
        link.close()
        output.close()
        source.close()
    return EXIT_OK


def _leave(signum: int, frame: FrameType | None) -> None:
    """Nothing here outlives the process, so there is nothing to finish: not even a step."""
    raise SystemExit(EXIT_OK)


def _scheduler(context: WorkerContext, built: Built, source: Input, output: Output, meter: Meter, pulse: Pulse) -> Scheduler:
    args, kv = context.boot.args.scheduler, built.kv
    waiting = make_queue(args.policy, args.priority_max_wait, lambda req: kv.known_pages(req)[0])
    chunk = None if args.chunked_prefill_size == "auto" else args.chunked_prefill_size
    return Scheduler(
        built.runner,
        kv,
        source,
        output,
        limits=_limits(context, built, args),
        chunk=chunk,
        meter=meter,
        pulse=pulse,
        waiting=waiting,
        overlap=_overlap(args.overlap, built),
        suspects=_suspects(context),
        ahead=built.ahead,
        journal=Journal(context.boot.ports.journal(context.rank), context.epoch, 2 * built.max_running),
    )


def _suspects(context: WorkerContext) -> Suspects:
    """What is known against requests; read before this scheduler's own journal takes the place of the last one's."""
    ports = context.boot.ports
    suspects = Suspects(ports.suspects(context.rank), context.boot.start_id)
    if context.crashed:
        suspects.learn(read_journal(ports.journal(context.rank), context.epoch))
    return suspects


def _limits(context: WorkerContext, built: Built, scheduler: SchedulerArgs) -> Limits:
    boot = context.boot
    return Limits(
        context_length=built.context_length,
        vocab_size=boot.files.vocab_size,
        max_running=built.max_running,
        max_queued=scheduler.max_queued_requests,
        queue_timeout=scheduler.queue_timeout,
        request_timeout=scheduler.request_timeout,
        eos_token_ids=boot.files.eos_token_ids,
    )


class _Gauges:
    """Takes the gauges when a heartbeat is due, in the link's thread: nothing is paid for them per step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.scheduler: Scheduler | None = None

    def totals(self) -> Totals:
        if self.scheduler is not None:
            counts = self.scheduler.kv.counts
            self._meter.set("llmd_requests_running", len(self.scheduler.decode.running))
            self._meter.set("llmd_requests_waiting", len(self.scheduler.waiting))
            self._meter.set("llmd_kv_capacity_pages", self.scheduler.kv.pages.pages_total)
            for state, count in (("free", counts.free), ("active", counts.active), ("cached", counts.cached)):
                self._meter.set("llmd_kv_pages", count, state=state)
        return self._meter.snapshot()


def _overlap(wish: bool | Literal["auto"], built: Built) -> bool:
    """Torch's forward pass on a CPU is dispatched by Python: another thread that prepares the next batch takes more from it than it saves."""
    return str(built.info["device"]).startswith("cuda") or built.info["kernels"] != "torch" if wish == "auto" else wish
