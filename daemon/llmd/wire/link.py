"""`WorkerLink`: a worker's line to control, in one thread of its own: Hello, Progress, Ready, heartbeats out; commands in.

The thread says Hello again whenever control asks, so control may be replaced at any time. Messages that control is not
there to take are dropped: a heartbeat leaves out only what control has been told, and from time to time nothing at all.
One that has nothing to tell is a datagram (`SideOutlet`), as long as somebody takes them.

All processes beat at the same moments, so that what hears them wakes once for all of them.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import zmq

from llmd.observability.pulse import next_tick
from llmd.wire import sockets
from llmd.wire.codec import BadFrame, Decoder, encode
from llmd.wire.messages import Command, Heartbeat, Hello, Message, Progress, Publish, Ready, Reply, Shared, Totals, WorkerInput
from llmd.wire.tables import Tables

log = logging.getLogger(__name__)

#: Seconds after which a heartbeat tells all again, though control has heard it.
TELL_AGAIN_S = 10.0

_PAGE = os.sysconf("SC_PAGE_SIZE")


class PulseLike(Protocol):
    """What the link reads of a work loop (llmd.observability.pulse.Pulse)."""

    phase: str
    steps: int

    @property
    def step_age_s(self) -> float: ...

    def forgive(self, seconds: float) -> None: ...


class WorkerLink:
    """Threaded client of the control channel. `on_message` runs in the link's thread and must be quick; so do `on_shared`, `totals` and `tables`.
    `introduction`: what a new control has to be told after Hello.

    `context`: ZMQ's, where the process has one of its own for this; default: the one that all of the process shares."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        heartbeat: float,
        pulse: PulseLike,
        totals: Callable[[], Totals],
        on_message: Callable[[Command | Publish], None],
        on_shared: Callable[[Shared], None] = lambda message: None,
        introduction: Callable[[], Iterable[Message]] = tuple,
        tables: Callable[[], Tables] = Tables,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._hello = hello
        self._period = heartbeat
        self._pulse = pulse
        self._totals = totals
        self._tables = tables
        self._on_message = on_message
        self._on_shared = on_shared
        self._introduction = introduction
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wakeup = sockets.Wakeup()
        self._stage: Message = Progress(stage="starting")
        self._stopping = False
        self._told: tuple[Totals | None, Tables | None] = None, None
        """What control knows."""
        self._told_at = 0.0
        self._identity = f"{hello.role}-{hello.rank}.{hello.incarnation}".encode()
        self._side = sockets.SideOutlet(endpoint, self._identity)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="control-link", daemon=True)
        self.bad_frames = 0

    def start(self) -> None:
        """Connect and say Hello."""
        self._thread.start()

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        """The start of this worker is getting on."""
        self._stage = Progress(stage=stage, done=done, total=total)
        self.send(self._stage)

    def ready(self, info: dict[str, Any] | None = None) -> None:
        """This worker can work."""
        self._stage = Ready(info=info or {})
        self.send(self._stage)

    def reply(self, command: Command, data: dict[str, Any] | None = None, *, code: str | None = None, message: str = "") -> None:
        """Answer a command; `code` set means it failed."""
        self.send(Reply(id=command.id, ok=code is None, data=data or {}, code=code, message=message))

    def send(self, message: Message) -> None:
        """Hand a message to the link's thread. Any thread may call this; after `close` it does nothing."""
        if self._stopping:
            return
        self._outbox.put(message)
        self._wakeup.set()

    def close(self) -> None:
        """Send what is waiting, then stop. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._wakeup.set()
        self._thread.join(timeout=2)
        if not self._thread.is_alive():
            self._wakeup.close()
            os.close(self._statm)

    def _run(self) -> None:
        context = self._context or zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.connect(self._endpoint)
        decoder: Decoder[Command | Publish | Shared] = Decoder(WorkerInput)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        self._introduce(socket)
        next_beat = time.monotonic()
        while not self._stopping:
            # Rounded up: it would otherwise turn without pause in the last millisecond before each beat.
            ready = dict(poller.poll(max(0, math.ceil((next_beat - time.monotonic()) * 1000))))
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            self._flush(socket)
            while socket in ready and (frame := sockets.receive(socket)) is not None:
                self._take(socket, decoder, frame)
            late = time.monotonic() - next_beat
            if late >= 0:
                if late > self._period:
                    self._pulse.forgive(late)
                self._send_beat(socket)
                next_beat = next_tick(self._period)
        self._flush(socket)
        socket.close()
        self._side.close()

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while not self._outbox.empty():
            self._send(socket, self._outbox.get_nowait())

    def _take(self, socket: zmq.Socket[bytes], decoder: Decoder[Command | Publish | Shared], frame: bytes) -> None:
        try:
            message = decoder.decode(frame)
        except BadFrame as error:
            self.bad_frames += 1
            log.warning("control channel: dropped a frame: %s", error)
            return
        if isinstance(message, Command) and message.verb == "hello":
            self._introduce(socket)
            return
        try:
            if isinstance(message, Command) and message.verb == "log_level":  # any process can do that, and also one that hangs
                logging.getLogger().setLevel(str(message.params["level"]).upper())
                self.reply(message)
            elif isinstance(message, Command | Publish):
                self._on_message(message)
            else:
                self._on_shared(message)
        except Exception:
            log.exception("a message from control could not be handled")

    def _introduce(self, socket: zmq.Socket[bytes]) -> None:
        self._told = None, None
        self._send(socket, self._hello)
        self._send(socket, self._stage)
        for message in self._introduction():
            self._send(socket, message)

    def _send_beat(self, socket: zmq.Socket[bytes]) -> None:
        """Whatever goes wrong with one heartbeat, the next one is tried: this thread's end would look like a hang."""
        try:
            if time.monotonic() - self._told_at >= TELL_AGAIN_S:
                self._told, self._told_at = (None, None), time.monotonic()
            now, told = (self._totals(), self._tables()), self._told
            beat = self._beat(None if now[0] == told[0] else now[0], None if now[1] == told[1] else now[1])
            if beat.totals is None and beat.tables is None and self._side.send(encode(beat)):
                return
            self._told = now if self._send(socket, beat) else (None, None)
        except Exception:
            log.exception("a heartbeat could not be made")

    def _beat(self, totals: Totals | None, tables: Tables | None) -> Heartbeat:
        """Opens no file: a process that is out of descriptors is not hung."""
        times = os.times()
        return Heartbeat(
            phase=self._pulse.phase,
            step_age_s=self._pulse.step_age_s,
            steps=self._pulse.steps,
            rss_bytes=int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE,
            cpu_s=times.user + times.system,
            totals=totals,
            tables=tables,
        )

    @staticmethod
    def _send(socket: zmq.Socket[bytes], message: Message) -> bool:
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def hello(role: str, rank: int, incarnation: int, epoch: int) -> Hello:
    """This process's introduction."""
    return Hello(role=role, rank=rank, pid=os.getpid(), incarnation=incarnation, epoch=epoch)
