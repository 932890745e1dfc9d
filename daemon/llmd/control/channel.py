"""The control channel: a ROUTER to which every worker connects, and a socket for the datagrams that its heartbeats are while it has nothing to
tell. Fills the table, sends commands and publications.

Runs in control's event loop and never blocks it: a worker whose queue is full simply misses a publication, and shows as not
answering a command. A frame that does not decode is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from msgspec import Struct

from llmd.control.table import Worker, WorkerTable
from llmd.wire import sockets
from llmd.wire.codec import BadFrame, Decoder, encode
from llmd.wire.messages import Command, ControlInput, Heartbeat, Hello, Message, Progress, Publish, Ready, Reply, Shared

log = logging.getLogger(__name__)

#: Bytes of the longest message that may arrive; a heartbeat has some ten kilobytes.
MAX_MESSAGE = 16 * 2**20

#: Bytes that are read of a datagram; a heartbeat that tells nothing has some hundred.
MAX_DATAGRAM = 4096

#: Seconds between two questions `hello` to one identity, and between two warnings about one source.
ASK_EVERY = 0.2
WARN_EVERY = 60.0

#: Messages handled before the event loop gets another turn: a flood of them must not keep it from its heartbeat.
MESSAGES_PER_TURN = 64

_QUIET = 1024


class RankReply(Struct, frozen=True, kw_only=True):
    """One worker's answer to a command; `answered` False: none within the deadline."""

    role: str
    rank: int
    answered: bool
    ok: bool
    code: str | None = None
    message: str = ""
    data: dict[str, Any] = {}


class Channel:
    """See the module. `on_message(worker, message)` runs after the table has taken the message in; `on_bad_frame` counts;
    a Hello that `believes` refuses changes nothing and is asked for again."""

    def __init__(
        self,
        table: WorkerTable,
        *,
        expected: frozenset[str],
        believes: Callable[[Hello], bool] = lambda hello: True,
        on_message: Callable[[Worker, Message], None],
        on_bad_frame: Callable[[], None],
    ) -> None:
        self._table = table
        self._expected = expected
        self._believes = believes
        self._on_message = on_message
        self._on_bad_frame = on_bad_frame
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, str, int], asyncio.Future[Reply]] = {}
        self._asked: dict[bytes, float] = {}
        self._warned: dict[bytes, float] = {}
        self._decoder: Decoder[Message] = Decoder(ControlInput)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Handle | None = None
        self._ended: asyncio.Future[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._side: socket.socket | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)

    def bind(self, endpoint: str) -> None:
        """Take the endpoint; the socket files of a dead control are replaced."""
        self._socket.bind(endpoint)
        self._side = sockets.side_inlet(endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._side is not None:
            self._side.close()

    async def run(self) -> None:
        """Take messages in, for ever. Raises what the handling of one has raised.

        zmq's descriptor says when something has come, once; each wake-up reads until nothing is left, without a task or a future for each message."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(descriptor, self._drain)
        self._drain_soon()
        try:
            await self._ended
        finally:
            self._loop.remove_reader(descriptor)
            self._loop = None

    def _drain_soon(self) -> None:
        if self._draining is None and self._loop is not None:
            self._draining = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        assert self._ended is not None
        try:
            for _ in range(MESSAGES_PER_TURN):
                if not sockets.readable(self._socket):
                    return
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                self._receive(parts[0], parts[1:])
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
            return
        self._drain_soon()

    def take_datagrams(self) -> None:
        """Take in what has come beside the ROUTER: nobody is woken for it."""
        assert self._side is not None, "bind comes first"
        with contextlib.suppress(BlockingIOError):
            for _ in range(MESSAGES_PER_TURN):
                identity, frame = sockets.from_side(self._side.recv(MAX_DATAGRAM))
                self._receive(identity, [frame])

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise BadFrame(f"{len(frames)} frames where there is one")
            message = self._decoder.decode(frames[0])
        except BadFrame as error:
            self._bad(identity, str(error))
            return
        now = time.monotonic()
        worker = self._introduce(identity, message, now) if isinstance(message, Hello) else self._table.by_identity(identity)
        if worker is None:
            self._ask(identity, now)
            return
        match message:
            case Progress():
                self._table.progress(worker, message, now)
            case Ready():
                self._table.ready(worker, message, now)
            case Heartbeat():
                self._table.heartbeat(worker, message, now)
            case Reply():
                worker.heard_at = now
                self._settle(worker, message)
        self._on_message(worker, message)

    def _introduce(self, identity: bytes, message: Hello, now: float) -> Worker | None:
        if f"{message.role}-{message.rank}" not in self._expected:
            self._bad(identity, f"Hello of {message.role}-{message.rank}, which is not in the plan")
            return None
        if not self._believes(message):
            return None  # and it is asked again
        self._asked.pop(identity, None)
        return self._table.hello(identity, message, now)

    def _ask(self, identity: bytes, now: float) -> None:
        if now - self._asked.get(identity, -ASK_EVERY) < ASK_EVERY:
            return
        if len(self._asked) > _QUIET:
            self._asked.clear()
        self._asked[identity] = now
        self._send(identity, Command(id=0, verb="hello"))

    def _bad(self, identity: bytes, why: str) -> None:
        self._on_bad_frame()
        now = time.monotonic()
        if now - self._warned.get(identity, -WARN_EVERY) < WARN_EVERY:
            return
        if len(self._warned) > _QUIET:
            self._warned.clear()
        self._warned[identity] = now
        source = self._table.by_identity(identity)
        log.warning("control channel: dropped a frame from %s: %s", source.name if source else ascii(identity[:64]), why)

    # ------------------------------------------------------------ out

    def publish(self, message: Publish | Shared, workers: Iterable[Worker]) -> None:
        """Send to each of `workers`; one that cannot take it now gets the next one."""
        frame = encode(message)
        for worker in workers:
            self._send_frame(worker.identity, frame)

    async def command(self, workers: Iterable[Worker], verb: str, params: dict[str, Any] | None = None, *, within: float) -> list[RankReply]:
        """Send `verb` to each of `workers`, wait `within` seconds for their replies; one result each, in their order."""
        number = next(self._ids)
        message = Command(id=number, verb=verb, params=params or {})
        return list(await asyncio.gather(*(self._one(worker, message, within) for worker in workers)))

    async def _one(self, worker: Worker, message: Command, within: float) -> RankReply:
        key = (message.id, worker.name, worker.incarnation)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            if not self._send(worker.identity, message):
                return _no_answer(worker, "cannot be reached")
            reply = await asyncio.wait_for(future, within)
            return RankReply(role=worker.role, rank=worker.rank, answered=True, ok=reply.ok, code=reply.code, message=reply.message, data=reply.data)
        except TimeoutError:
            return _no_answer(worker, f"did not answer within {within:.1f} s")
        except ConnectionResetError:
            return _no_answer(worker, "ended before it answered")
        finally:
            del self._waiting[key]

    def forget(self, worker: Worker) -> None:
        """The worker is gone: whoever waits for its replies is told."""
        for (_, name, incarnation), future in self._waiting.items():
            if (name, incarnation) == (worker.name, worker.incarnation) and not future.done():
                future.set_exception(ConnectionResetError())

    def _settle(self, worker: Worker, reply: Reply) -> None:
        future = self._waiting.get((reply.id, worker.name, worker.incarnation))
        if future is not None and not future.done():
            future.set_result(reply)

    def _send(self, identity: bytes, message: Message) -> bool:
        return self._send_frame(identity, encode(message))

    def _send_frame(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False  # its queue is full, or there is no such peer
        finally:
            self._drain_soon()  # a send takes notice of what has come as well, and the descriptor then says nothing of it
        return True


def _no_answer(worker: Worker, message: str) -> RankReply:
    return RankReply(role=worker.role, rank=worker.rank, answered=False, ok=False, code="no_answer", message=message)
