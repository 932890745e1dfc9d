"""State of requests in flight: `ReqState` for each rid, `Generation` for the HTTP request that waits for them.

The engine's side puts pieces in, the handler takes them out; what a slow handler has not taken yet is merged, and how
much that is can be seen (`unread`). A handler is woken once for all that one step brought.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from llmd.errors import RequestError
from llmd.wire.messages import Finish, TextChunk, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput, TokenLogprob

#: Pieces of text and logprobs that a choice keeps as objects; what waits beyond them is joined and packed: a token with twenty
#: alternatives has kilobytes as objects.
LOOSE = 64

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


Submitted = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput


class Delta(Struct, frozen=True, gc=False):
    """What one choice has to add since the last look."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    finish: Finish | None


class _Packed(Struct, frozen=True):
    """Text, ids and logprobs that belong together and have waited for long."""

    text: str
    token_ids: list[int]
    logprobs: bytes


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
        "unread",
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
        self._packed: list[_Packed] = []
        self.unread = 0
        """Characters and packed bytes that wait to be taken, roughly."""
        self._prompt_logprobs: list[TokenLogprob] | bytes | None = None
        """Packed where there are many."""

    def put(self, chunk: TextChunk) -> None:
        """Take in the next piece; the caller has checked its place."""
        if chunk.first == 0:
            self.cached_tokens = min(chunk.cached_tokens, len(self.request.input_ids))
        self.output_ids += chunk.token_ids
        self._ids += chunk.token_ids
        if chunk.text:
            self._text.append(chunk.text)
            self.unread += len(chunk.text)
        if chunk.logprobs:
            self._logprobs += chunk.logprobs
        if len(self._text) >= LOOSE or len(self._logprobs) >= LOOSE:
            self._compact()
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs if len(chunk.prompt_logprobs) <= LOOSE else _pack(chunk.prompt_logprobs)
        self.finish = chunk.finish
        self.generation.touch(self)

    def put_vector(self, vector: bytes) -> None:
        """The one piece that a text to embed has."""
        self.vector, self.finish = vector, Finish("stop")
        self.generation.touch(self)

    @property
    def outcome(self) -> str:
        """The metrics' word for how it ended."""
        return "error" if self.finish is None else "ok" if self.vector else self.finish.reason

    def take(self) -> Delta:
        """All pieces since the last call, as one."""
        delta = self.take_piece()
        if not self.more:
            return delta
        text, ids, logprobs = [delta.text], delta.token_ids, delta.logprobs
        while self.more:
            more = self.take_piece()
            text.append(more.text)
            ids += more.token_ids
            logprobs += more.logprobs
        return Delta(delta.index, "".join(text), ids, logprobs, delta.prompt_logprobs, self.finish)

    def take_piece(self) -> Delta:
        """The first pieces since the last call, with few enough logprobs to be made into objects; `more` says whether there are others."""
        prompt_logprobs, texts = None, self._text
        if self._prompt_logprobs is not None:
            waiting, self._prompt_logprobs = self._prompt_logprobs, None
            prompt_logprobs = _unpack(waiting) if isinstance(waiting, bytes) else waiting
        if self._packed:
            piece = self._packed.pop(0)
            self.unread -= len(piece.text) + len(piece.logprobs)
            finish = None if self.more else self.finish
            return Delta(self.index, piece.text, piece.token_ids, _unpack(piece.logprobs), prompt_logprobs, finish)
        delta = Delta(self.index, texts[0] if len(texts) == 1 else "".join(texts), self._ids, self._logprobs, prompt_logprobs, self.finish)
        self._text, self._ids, self._logprobs, self.unread = [], [], [], 0
        return delta

    @property
    def weight(self) -> int:
        """Logprobs that wait to be taken, alternatives included, and numbers of a vector, roughly: what their answer costs."""
        request = self.request
        if isinstance(request, TokenizedEmbeddingReqInput):
            return len(self.vector) // 4
        if request.logprobs < 0:
            return 0
        prompt = len(request.input_ids) if self._prompt_logprobs is not None else 0
        return (prompt + len(self._logprobs) + LOOSE * len(self._packed)) * (request.logprobs + 1)

    @property
    def more(self) -> bool:
        """Whether something waits to be taken."""
        return bool(self._packed or self._ids or self._text)

    def _compact(self) -> None:
        """Bring what waits into its smallest form. Without logprobs that is one text."""
        text = "".join(self._text)
        if not self._logprobs:
            self._text = [text]
            return
        packed = _pack(self._logprobs)
        self._packed.append(_Packed(text, self._ids, packed))
        self._text, self._ids, self._logprobs = [], [], []
        self.unread += len(packed)


class Generation:
    """All choices of one HTTP request, and the one handler that waits for them."""

    __slots__ = (
        "_touched",
        "_unfinished",
        "_waiter",
        "choices",
        "client_id",
        "counted",
        "disconnected",
        "error",
        "going",
        "light",
        "listener",
        "metered",
        "names",
        "rid",
        "streamed",
    )

    def __init__(self, rid: str, *, streamed: bool, metered: bool = True, client_id: str = "") -> None:
        """`streamed`: the handler wants every piece; else it is woken when all choices are finished. `client_id`: the client's X-Request-Id."""
        self.rid = rid
        self.counted = 0
        """Tokens that the metrics have already: those of a stream count as they come."""
        self.client_id = client_id
        self.names: tuple[str, ...] = ()
        """What its client calls its choices (`rid` of /generate)."""
        self.streamed = streamed
        self.metered = metered
        self.choices: list[ReqState] = []
        self.error: RequestError | None = None
        self.disconnected = False
        self.going = True
        """Neither finished nor failed nor left by its client."""
        self.light = True
        """Nothing in its answer has a weight."""
        self.listener: Callable[[], None] | None = None
        """Called at each piece, error or disconnect, where nobody waits in `wait`."""
        self._touched: dict[int, ReqState] = {}
        self._unfinished = 0
        self._waiter: asyncio.Future[bool] | None = None

    def add(self, request: Submitted) -> ReqState:
        """One more choice."""
        state = ReqState(request, len(self.choices), self)
        self.choices.append(state)
        self.light = self.light and isinstance(request, TokenizedGenerateReqInput) and request.logprobs < 0
        self._unfinished += 1
        return state

    def touch(self, state: ReqState) -> None:
        """`state` has something new."""
        self._touched[state.index] = state
        if state.finish is not None:
            self._unfinished -= 1
            self.going = self.going and self._unfinished > 0
        if self.listener is not None:
            self.listener()
        elif self.news:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End the whole request with an error; the first one counts."""
        self.going = False
        if self.error is None:
            self.error = error
        self._wake()

    def disconnect(self) -> None:
        """The client has hung up."""
        self.disconnected, self.going = True, False
        self._wake()

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self._unfinished == 0

    @property
    def has_vectors(self) -> bool:
        """Whether some of its texts have been embedded."""
        return any(choice.vector for choice in self.choices)

    @property
    def done(self) -> bool:
        """Every choice is finished and taken."""
        return self._unfinished == 0 and not self._touched

    @property
    def unread(self) -> int:
        """Characters and packed bytes that wait to be taken, roughly."""
        return sum(choice.unread for choice in self.choices)

    @property
    def weight(self) -> int:
        """What an answer with all that waits to be taken costs; see `ReqState.weight`."""
        return 0 if self.light else sum(state.weight for state in self._touched.values())

    @property
    def news(self) -> bool:
        """Whether there is something for the handler: pieces that it wants, an error, a disconnect."""
        pieces = bool(self._touched) and (self.streamed or self._unfinished == 0)
        return pieces or self.error is not None or self.disconnected

    async def wait(self, patience: float) -> bool:
        """Until there is something to take, an error or a disconnect; False when `patience` seconds passed first."""
        if self.news:
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

    def take_pieces(self) -> list[Delta]:
        """As `take`, but of each choice no more than `ReqState.take_piece` gives; the rest stays news."""
        touched = self._touched
        if len(touched) == 1:
            (state,) = touched.values()
            delta = state.take_piece()
            if not state.more:
                touched.clear()
            return [delta]
        deltas = [touched[index].take_piece() for index in sorted(touched)]
        self._touched = {index: state for index, state in touched.items() if state.more}
        return deltas

    def _wake(self) -> None:
        if self.listener is not None:
            self.listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
