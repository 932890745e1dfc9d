"""The frontend's two data sockets in the event loop: `SchedulerPort` out, `OutputReceiver` in. Neither ever blocks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from llmd.observability.totals import Meter
from llmd.plan.ports import PortArgs
from llmd.wire import sockets
from llmd.wire.codec import BadFrame, Decoder
from llmd.wire.messages import FrontendInput, SchedulerInput, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

log = logging.getLogger(__name__)

#: Seconds between tries while the scheduler's socket is not connected: the first, and what doubling reaches.
RETRY_S: Final = 0.002
RETRY_MOST_S: Final = 0.1
#: Frames handled before the event loop gets another turn.
FRAMES_PER_TURN: Final = 64
#: Seconds of that, after which it gets one at the next frame: one with the logprobs of a long prompt takes some milliseconds.
TURN_S: Final = 0.02

Outgoing = SchedulerInput
Incoming = FrontendInput


class SchedulerPort:
    """PUSH to the entry rank of one epoch; a new epoch gets a new socket, and what waited for the old one is dropped.

    `patience`: seconds that a message may wait for a scheduler that is there and does not take it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, undeliverable: Callable[[str], None], patience: float) -> None:
        self.epoch = 0
        """The one that is connected; 0: none."""
        self.patience = patience
        self._pause = RETRY_S
        self._context = context
        self._ports = ports
        self._undeliverable = undeliverable
        self._socket: zmq.Socket[bytes] | None = None
        self._waiting: deque[tuple[float, Outgoing]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, epoch: int) -> None:
        """Connect to `epoch`'s scheduler in place of the last one."""
        self.close()
        self.epoch = epoch
        self._socket = sockets.push(self._context, self._ports.scheduler_input(epoch))

    def close(self) -> None:
        self.epoch = 0
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def send(self, message: Outgoing) -> None:
        """Send, in order, as soon as the scheduler takes it; `undeliverable(rid)` is called for a request that it never takes."""
        if not self._waiting and self._socket is not None and sockets.send(self._socket, message):
            return
        self._waiting.append((time.monotonic() + self.patience, message))
        if self._timer is None:
            self._pause = RETRY_S
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._retry)

    def _retry(self) -> None:
        self._timer = None
        while self._waiting:
            deadline, message = self._waiting[0]
            if self._socket is None or not sockets.send(self._socket, message):
                if time.monotonic() < deadline:
                    self._pause = min(2 * self._pause, RETRY_MOST_S)
                    self._timer = asyncio.get_running_loop().call_later(self._pause, self._retry)
                    return
                if isinstance(message, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
                    self._undeliverable(message.rid)
            self._waiting.popleft()


class Gathering(Protocol):
    """Who wants to act once for all messages that are read at one wake-up."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class OutputReceiver:
    """PULL of tokenizer.N. zmq's descriptor is edge-triggered: each wake-up reads until nothing is left."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, handle: Callable[[Incoming], None], meter: Meter, gathering: Gathering | None = None
    ) -> None:
        self._gathering = gathering
        self._socket = sockets.pull(context, endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._handle = handle
        self._meter = meter
        self._decoder: Decoder[Incoming] = Decoder(FrontendInput)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        if self._gathering is None:
            self._read()
            return
        self._gathering.begin()
        try:
            self._read()
        finally:
            self._gathering.end()

    def _read(self) -> None:
        enough = time.monotonic() + TURN_S
        for _ in range(FRAMES_PER_TURN):
            if self._closed:
                return
            frame = sockets.receive(self._socket)
            if frame is None:
                return
            try:
                message = self._decoder.decode(frame)
            except BadFrame as error:
                self._meter.inc("llmd_wire_bad_frames_total", channel="tokenizer")
                log.warning("tokenizer channel: dropped a frame: %s", error)
                continue
            self._handle(message)
            if time.monotonic() > enough:
                break
        self._loop.call_soon(self._drain)
