"""State of requests in flight: `ReqState` for each rid, `Generation` for the HTTP request that waits for them.

The engine's side puts pieces in, the handler takes them out; what a slow handler has not taken yet is merged, so a
request never holds more than its own output. A handler is woken once for all that one step brought.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from msgspec import Struct

from llmd.errors import RequestError
from llmd.wire.messages import Finish, TextChunk, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput, TokenLogprob

#: Logprobs that a choice keeps as objects; what waits beyond them is packed: a token with twenty alternatives has kilobytes as objects.
LOOSE = 64

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


Submitted = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput


class Delta(Struct, frozen=True):
    """What one choice has to add since the last look."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    finish: Finish | None


class ReqState:
    """One rid from submission to its last delivered token: enough to deliver it, and to submit it again."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_packed",
        "_prompt_logprobs",
        "_text",
        "cached_tokens",
        "finish",
        "first_at",
        "generation",
        "index",
        "last_at",
        "output_ids",
        "request",
        "sent_at",
        "vector",
    )

    def __init__(self, request: Submitted, index: int, generation: Generation) -> None:
        self.request = request
        self.index = index
        self.generation = generation
        self.output_ids: list[int] = []
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.vector = b""
        """Of a text to embed that is finished: float32, little-endian."""
        self.sent_at = time.monotonic()
        self.first_at = 0.0
        self.last_at = 0.0
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._packed: list[bytes] = []
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def put(self, chunk: TextChunk) -> None:
        """Take in the next piece; the caller has checked its place."""
        if chunk.first == 0:
            self.cached_tokens = min(chunk.cached_tokens, len(self.request.input_ids))
        self.output_ids += chunk.token_ids
        self._ids += chunk.token_ids
        if chunk.text:
            self._text.append(chunk.text)
        if chunk.logprobs:
            self._logprobs += chunk.logprobs
            if len(self._logprobs) >= LOOSE:
                self._packed.append(_pack(self._logprobs))
                self._logprobs = []
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs
        self.finish = chunk.finish
        self.generation.touch(self)

    def put_vector(self, vector: bytes) -> None:
        """The one piece that a text to embed has."""
        self.vector, self.finish = vector, Finish("stop")
        self.generation.touch(self)

    def take(self) -> Delta:
        """All pieces since the last call, as one."""
        logprobs = self._logprobs
        if self._packed:
            logprobs = [entry for piece in self._packed for entry in _unpack(piece)] + logprobs
        delta = Delta(self.index, "".join(self._text), self._ids, logprobs, self._prompt_logprobs, self.finish)
        self._text, self._ids, self._logprobs, self._packed, self._prompt_logprobs = [], [], [], [], None
        return delta


class Generation:
    """All choices of one HTTP request, and the one handler that waits for them."""

    __slots__ = ("_touched", "_unfinished", "_waiter", "choices", "client_id", "disconnected", "error", "metered", "names", "rid", "streamed")

    def __init__(self, rid: str, *, streamed: bool, metered: bool = True, client_id: str = "") -> None:
        """`streamed`: the handler wants every piece; else it is woken when all choices are finished. `client_id`: the client's X-Request-Id."""
        self.rid = rid
        self.client_id = client_id
        self.names: tuple[str, ...] = ()
        """What its client calls its choices (`rid` of /generate)."""
        self.streamed = streamed
        self.metered = metered
        self.choices: list[ReqState] = []
        self.error: RequestError | None = None
        self.disconnected = False
        self._touched: dict[int, ReqState] = {}
        self._unfinished = 0
        self._waiter: asyncio.Future[bool] | None = None

    def add(self, request: Submitted) -> ReqState:
        """One more choice."""
        state = ReqState(request, len(self.choices), self)
        self.choices.append(state)
        self._unfinished += 1
        return state

    def touch(self, state: ReqState) -> None:
        """`state` has something new."""
        self._touched[state.index] = state
        if state.finish is not None:
            self._unfinished -= 1
        if self._news:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End the whole request with an error; the first one counts."""
        if self.error is None:
            self.error = error
        self._wake()

    def disconnect(self) -> None:
        """The client has hung up."""
        self.disconnected = True
        self._wake()

    @property
    def done(self) -> bool:
        """Every choice is finished and taken."""
        return self._unfinished == 0 and not self._touched

    @property
    def _news(self) -> bool:
        pieces = bool(self._touched) and (self.streamed or self._unfinished == 0)
        return pieces or self.error is not None or self.disconnected

    async def wait(self, patience: float) -> bool:
        """Until there is something to take, an error or a disconnect; False when `patience` seconds passed first."""
        if self._news:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(patience, _expire, waiter)
        try:
            return await waiter
        finally:
            self._waiter = None
            timer.cancel()

    def take(self) -> list[Delta]:
        """What is new, one Delta a choice, in the order of the choices."""
        deltas = [self._touched[index].take() for index in sorted(self._touched)]
        self._touched.clear()
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
