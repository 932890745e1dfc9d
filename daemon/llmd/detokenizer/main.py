"""The detokenizer's process: token ids of all requests in, text out to the frontends that own them.

Holds no weights and no clients; may be killed at any time. What it then no longer knows it says with Detokenizer404.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import zmq

from llmd import failpoints
from llmd.detokenizer.detokenizer import Detokenizer
from llmd.detokenizer.outlet import Outlet
from llmd.errors import EXIT_OK
from llmd.observability.process import freeze_gc
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.plan.context import WorkerContext
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire import link, sockets
from llmd.wire.codec import BadFrame, Decoder, encode
from llmd.wire.messages import AbortReq, BatchTokenIDOutput, Command, DetokenizerInput, Publish, Totals

log = logging.getLogger(__name__)

#: Messages taken in before output is sent: bounds the delay of the first when many wait.
MAX_FRAMES = 64


def run(context: WorkerContext) -> int:
    """Serve until SIGTERM; returns the exit status. Raises ConfigError on a tokenizer that cannot be used."""
    return _Process(context).run()


class _Process:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pulse = Pulse()
        self._meter = Meter()
        self._wakeup = sockets.Wakeup()
        self._stopping = False
        self._core: Detokenizer | None = None
        self._decoder: Decoder[BatchTokenIDOutput | AbortReq] = Decoder(DetokenizerInput)
        boot = context.boot
        self._link = link.WorkerLink(
            boot.ports.control,
            link.hello(context.role, context.rank, context.incarnation, context.epoch),
            heartbeat=boot.args.supervision.heartbeat,
            pulse=self._pulse,
            totals=self._totals,
            on_message=self._on_message,
        )

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._wakeup.hear_signals()
        self._meter.set("llmd_detokenizer_states", 0)
        self._link.start()
        self._link.progress("loading tokenizer")
        boot = self._context.boot
        frontends = boot.args.http.workers
        table = TokenBytes.load(Path(boot.files.small_dir))
        self._core = core = Detokenizer(table, epoch=self._context.epoch, frontends=frontends, meter=self._meter, pause=self._breathe)
        with zmq.Context() as context:
            self._inlet = sockets.pull(context, boot.ports.detokenizer)
            self._outlets = [Outlet(context, boot.ports.tokenizer(n)) for n in range(frontends)]
            self._link.ready({"tokenizer_size": table.size})
            try:
                self._serve(core)
            finally:
                self._inlet.close()
                for outlet in self._outlets:
                    outlet.close()
        self._link.close()
        return EXIT_OK

    def _serve(self, core: Detokenizer) -> None:
        poller = zmq.Poller()
        poller.register(self._inlet, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        watched: set[Outlet] = set()
        while not self._stopping:
            ready = dict(poller.poll())
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            for outlet in watched:
                if outlet.socket in ready:
                    outlet.flush()
            if self._inlet in ready:
                self._pulse.begin()
                self._step(core)
                self._pulse.end()
            behind = {outlet for outlet in self._outlets if outlet.backlog}
            for outlet in behind ^ watched:
                poller.register(outlet.socket, zmq.POLLOUT if outlet in behind else 0)
            watched = behind

    def _step(self, core: Detokenizer) -> None:
        """Take in what has arrived, then send each frontend its share."""
        for _ in range(MAX_FRAMES):
            frame = sockets.receive(self._inlet)
            if frame is None:
                break
            try:
                message = self._decoder.decode(frame)
            except BadFrame as error:
                self._meter.inc("llmd_wire_bad_frames_total", channel="detokenizer")
                log.warning("dropped a frame: %s", error)
                continue
            if isinstance(message, BatchTokenIDOutput):
                failpoints.hit("detokenizer.batch")
            core.take(message)
        self._send(core)

    def _breathe(self) -> None:
        """In the midst of much work: the loop still turns, and what is done need not wait for the rest."""
        self._pulse.beat()
        if self._core is not None:
            self._send(self._core)

    def _send(self, core: Detokenizer) -> None:
        for frontend, output in core.drain():
            if not self._outlets[frontend].send(encode(output)):
                self._meter.inc("llmd_detokenizer_dropped_backlogs_total")
                log.warning("frontend %d takes no output: what was kept for it is dropped", frontend)
                core.forget(frontend)

    def _totals(self) -> Totals:
        """In the link's thread: nothing is paid for it per step."""
        if self._core is not None:
            self._meter.set("llmd_detokenizer_states", len(self._core))
        return self._meter.snapshot()

    def _on_message(self, message: Command | Publish) -> None:
        """In the link's thread."""
        if not isinstance(message, Command):
            return
        if message.verb == "freeze":
            freeze_gc()
            self._link.reply(message)
        else:
            self._link.reply(message, code="unknown_verb", message=f"the detokenizer has no command {message.verb!r}")

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True
        self._wakeup.set()
