"""What comes in: requests and aborts from the frontends, commands from control; and the only place where the scheduler waits."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import zmq

from llmd.observability.totals import Meter
from llmd.plan.ports import PortArgs
from llmd.wire import sockets
from llmd.wire.codec import BadFrame, Decoder
from llmd.wire.messages import Command, Publish, SchedulerInput

log = logging.getLogger(__name__)


class Input:
    """The PULL socket of this epoch, and the commands that the control link's thread hands over. Bound by `open`, once there is a model."""

    def __init__(self, epoch: int, meter: Meter) -> None:
        self._epoch = epoch
        self._meter = meter
        self._socket: zmq.Socket[bytes] | None = None
        self._decoder: Decoder[SchedulerInput] = Decoder(SchedulerInput)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wakeup = sockets.Wakeup()

    def open(self, context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs) -> None:
        """Bind the channel; from now on requests are taken."""
        _remove_stale(ports, self._epoch)
        self._socket = sockets.pull(context, ports.scheduler_input(self._epoch))

    def hand_over(self, message: Command | Publish) -> None:
        """A message from control; called in the link's thread."""
        if isinstance(message, Command):
            self._commands.put(message)
            self._wakeup.set()

    def wait(self, until: float | None, writable: Iterable[zmq.Socket[bytes]]) -> None:
        """Block until there is something to take, a socket of `writable` has a peer, or the monotonic time `until` (None: as long as it takes)."""
        poller = zmq.Poller()
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for socket in writable:
            poller.register(socket, zmq.POLLOUT)
        poller.poll(None if until is None else max(0, int((until - time.monotonic()) * 1000) + 1))

    def messages(self) -> Iterator[SchedulerInput]:
        """All requests and aborts that are there; those of another epoch, and frames that are none, are dropped and counted."""
        while self._socket is not None and (frame := sockets.receive(self._socket)) is not None:
            try:
                message = self._decoder.decode(frame)
            except BadFrame as error:
                self._meter.inc("llmd_wire_bad_frames_total", channel="scheduler_input")
                log.warning("scheduler input: dropped a frame: %s", error)
                continue
            if message.epoch != self._epoch:
                self._meter.inc("llmd_wire_stale_messages_total", channel="scheduler_input")
                continue
            yield message

    def hear_signals(self) -> None:
        """A signal ends a `wait` too, whichever thread the kernel gives it to. For the main thread."""
        self._wakeup.hear_signals()

    def wake(self) -> None:
        """End a `wait`; may be called from a signal handler."""
        self._wakeup.set()

    def commands(self) -> Iterator[Command]:
        """All commands that are there."""
        self._wakeup.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._commands.get_nowait()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._wakeup.close()


def _remove_stale(ports: PortArgs, epoch: int) -> None:
    """Socket files of other epochs: their owners are dead, since the engine restarts as one."""
    for path in Path(ports.private).glob("scheduler_input.*"):
        match = re.fullmatch(r"scheduler_input\.(\d+)", path.name)
        if match and int(match[1]) != epoch:
            path.unlink(missing_ok=True)
