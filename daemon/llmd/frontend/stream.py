"""`Stream`: one Generation as server-sent events. `Streams`: all of a frontend's, written once for all that the last messages brought.

Most of a stream's life costs no task: `push` writes what is new past ASGI, straight to the connection. A stream's task does what is
rare: the first byte, which is a status line, waiting for a client that does not read, pings, the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from llmd.errors import RequestError
from llmd.frontend.exchange import PIPE, Exchange, Scope, Send, outcome_of
from llmd.frontend.making import INLINE_WEIGHT, Maker
from llmd.frontend.openai.answers import DONE, Answer
from llmd.frontend.replies import error_body, internal_error
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.server import BodyPipe

log = logging.getLogger(__name__)

#: What a proxy sees while a stream has nothing to say.
PING: Final = b": ping\n\n"
EVENT_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
#: Characters and packed logprobs of one request that may wait for a client which does not read; one that lets more pile up is cut.
#: As text it is more than any context; logprobs with twenty alternatives get there after some 2,500 tokens.
MAX_UNREAD: Final = 2**20

#: Seconds of writing after which everybody else in the event loop gets a turn.
TURN_S: Final = 0.02


class SlowClient(Exception):
    """The client has not read for `http.stream_write_timeout`, or has let too much pile up."""


class Streams:
    """Those streams that have news. One wake-up for all that came, however many streams and steps it was for."""

    def __init__(self) -> None:
        self._news: list[Stream] = []
        self._reading = False
        self.maker = Maker()

    def begin(self) -> None:
        """Messages are being read; what they bring is written at `end`."""
        self._reading = True

    def end(self) -> None:
        """They have been read."""
        self._reading = False
        if self._news:
            self._flush()

    def announce(self, stream: Stream) -> None:
        """`stream` wants its `push` called, once, when the messages at hand have been read."""
        if not self._news and not self._reading:
            asyncio.get_running_loop().call_soon(self._flush)
        self._news.append(stream)

    def _flush(self) -> None:
        news, self._news = self._news, []
        enough = time.perf_counter() + TURN_S
        for at, stream in enumerate(news, 1):
            stream.push()
            if at < len(news) and time.perf_counter() > enough:
                self._news = news[at:] + self._news
                asyncio.get_running_loop().call_soon(self._flush)
                return


class Stream:
    """One stream. The response starts with the first piece of output, so that a refusal still is a status line.

    `ping`: seconds of silence after which there is a comment; `patience`: seconds that a client may take to read what is buffered.
    """

    def __init__(
        self, streams: Streams, scope: Scope, send: Send, exchange: Exchange, generation: Generation, answer: Answer, *, ping: float, patience: float
    ) -> None:
        self._streams = streams
        self._pipe: BodyPipe = scope[PIPE]
        self._send = send
        self._exchange = exchange
        self._generation = generation
        self._answer = answer
        self._ping, self._patience = ping, patience
        self._loop = asyncio.get_running_loop()
        self._started = False
        self._held = True
        """The task writes, `push` stands back."""
        self._queued = False
        self._attention = asyncio.Event()
        self._last = self._loop.time()
        """When something was written last."""

    async def run(self) -> None:
        """Until the last byte is sent or the client is gone. Raises RequestError while no byte has been sent; SlowClient."""
        self._generation.listener = self._on_news
        self._attention.set()  # there may be news from before
        try:
            while not await self._attend():
                await self._until_needed()
        except (RequestError, SlowClient):
            raise
        except Exception:
            if not self._started:
                raise
            log.exception("a stream failed", extra={"request_id": self._exchange.request_id, "rid": self._exchange.rid})
            await self._fail(b"", internal_error())
        finally:
            self._generation.listener = None
            self._held = True

    # ------------------------------------------------------------ in the loop, without a task

    def _on_news(self) -> None:
        if self._held:
            self._attention.set()
        elif not self._queued:
            self._queued = True
            self._streams.announce(self)

    def push(self) -> None:
        """Write what is new, or leave it to the task."""
        self._queued = False
        generation, pipe = self._generation, self._pipe
        if self._held or not generation.going or pipe.paused or generation.weight > INLINE_WEIGHT:
            self._hold()
            return
        try:
            deltas = generation.take_pieces()
            data = self._answer.chunk(deltas[0]) if len(deltas) == 1 else b"".join(map(self._answer.chunk, deltas))
            if data:
                pipe.write(data)
                self._last = self._loop.time()
        except Exception:
            log.exception("a stream failed", extra={"request_id": self._exchange.request_id, "rid": self._exchange.rid})
            generation.fail(internal_error())
            self._hold()
            return
        if generation.news:
            self._hold()

    def _hold(self) -> None:
        self._held = True
        self._attention.set()

    # ------------------------------------------------------------ the task

    async def _until_needed(self) -> None:
        """Until there is something for the task to do; pings meanwhile."""
        while not self._attention.is_set():
            try:
                async with asyncio.timeout_at(self._last + self._ping):
                    await self._attention.wait()
            except TimeoutError:
                if self._loop.time() - self._last >= self._ping:
                    await self._write(PING)

    async def _attend(self) -> bool:
        """Write what there is; whether that was the end."""
        self._attention.clear()
        self._held = True
        generation = self._generation
        while True:
            if generation.disconnected:
                self._exchange.settle("client_disconnect")
                return True
            if generation.error is not None:
                await self._fail(await self._made(generation.weight, generation.take()), generation.error)
                return True
            if not generation.news:
                self._held = not self._started
                return False
            if not await self._writable():
                continue
            data = await self._made(generation.weight, generation.take_pieces())
            if generation.done:
                await self._end(data)
                return True
            if data:
                await self._write(data)

    async def _made(self, weight: int, deltas: list[Delta]) -> bytes:
        return await self._streams.maker.make(weight, lambda: b"".join(map(self._answer.chunk, deltas)))

    async def _end(self, data: bytes) -> None:
        generation, exchange = self._generation, self._exchange
        self._answer.usage.settle(generation)
        await self._write(data + self._answer.closing() + DONE, last=True)
        for choice in generation.choices:
            exchange.settle(choice.finish.reason if choice.finish is not None else "error")
        if generation.disconnected:
            exchange.settle("client_disconnect")

    async def _fail(self, data: bytes, error: RequestError) -> None:
        if not self._started and not data:
            raise error
        self._exchange.settle(outcome_of(error))
        await self._write(b"%bdata: %b\n\n%b" % (data, error_body(error), DONE), last=True)

    async def _writable(self) -> bool:
        """Wait for a client that does not read; False where the request has ended meanwhile. Raises SlowClient."""
        if not self._pipe.paused:
            return True
        generation, deadline = self._generation, self._loop.time() + self._patience
        drained = asyncio.ensure_future(self._pipe.drain())
        try:
            while not drained.done():
                self._attention.clear()
                if generation.error is not None or generation.disconnected:
                    return False
                if generation.unread > MAX_UNREAD or self._loop.time() >= deadline:
                    raise SlowClient
                wanted = asyncio.ensure_future(self._attention.wait())
                await asyncio.wait((drained, wanted), timeout=deadline - self._loop.time(), return_when=asyncio.FIRST_COMPLETED)
                wanted.cancel()
        finally:
            drained.cancel()
        return True

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        if self._pipe.paused:
            try:
                async with asyncio.timeout(self._patience):
                    await self._pipe.drain()
            except TimeoutError:
                raise SlowClient from None
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._last = self._loop.time()
