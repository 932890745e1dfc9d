"""`Detokenizer`: the requests of the current epoch, and what one step brings for each frontend. No sockets in here."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmd.detokenizer.request import Gap, RequestState
from llmd.detokenizer.slices import PIECE, pieces, weight_of
from llmd.observability.totals import Meter
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire.messages import AbortReq, BatchStrOutput, BatchTokenIDOutput, Detokenizer404, TextChunk, TokenChunk

#: Requests ended here whose last chunks may still be on their way; only these are ever forgotten by number.
MAX_ENDED = 10_000
#: Seconds of nothing but messages of an earlier epoch, after which that one is believed again: what is left of a dead engine's output is gone long before.
BACK_S = 1.0
#: Tokens and alternatives taken in, after which what they came to is sent: some ten milliseconds of work.
MAX_WEIGHT = 8192


class Detokenizer:
    """`take` messages, then `drain` once a step. A request's state goes with its finish, its abort or its epoch, never before.

    `pause` is called within `take` when much has been taken in since the last `drain`; it may call `drain`.
    """

    def __init__(self, table: TokenBytes, *, epoch: int, frontends: int, meter: Meter, pause: Callable[[], None] = lambda: None) -> None:
        self._pause = pause
        self._weight = 0
        self._table = table
        self._epoch = epoch
        self._frontends = frontends
        self._meter = meter
        self._states: dict[str, RequestState] = {}
        self._ended: dict[str, None] = {}
        self._out: dict[int, list[TextChunk]] = {}
        self._unknown: dict[str, int] = {}
        """rid -> its frontend."""
        self._earlier_since: float | None = None

    def __len__(self) -> int:
        return len(self._states)

    def take(self, message: BatchTokenIDOutput | AbortReq) -> None:
        """Take one message of the scheduler in. One of an older epoch is dropped, one of a newer ends all that was before.

        Where the newer one was nobody's, the engine that goes on speaking is heard again after `BACK_S`.
        """
        if message.epoch == self._epoch:
            self._earlier_since = None
        elif not self._enter(message.epoch):
            return
        if isinstance(message, AbortReq):
            self._states.pop(message.rid, None)
            self._ended.pop(message.rid, None)
            return
        for chunk in message.chunks:
            for piece in pieces(chunk) if len(chunk.token_ids) > PIECE else (chunk,):
                self._take(piece)
                self._weight += weight_of(piece)
                if self._weight > MAX_WEIGHT:
                    self._weight = 0
                    self._pause()

    def drain(self) -> list[tuple[int, BatchStrOutput | Detokenizer404]]:
        """(frontend, message) for all that was taken in since the last call: one batch a frontend."""
        messages: list[tuple[int, BatchStrOutput | Detokenizer404]] = [
            (frontend, BatchStrOutput(epoch=self._epoch, chunks=chunks)) for frontend, chunks in self._out.items()
        ]
        messages += [(frontend, Detokenizer404(rid=rid, epoch=self._epoch)) for rid, frontend in self._unknown.items()]
        self._out = {}
        self._unknown = {}
        self._weight = 0
        return messages

    def forget(self, frontend: int) -> None:
        """Output of this frontend was lost: whatever else comes for its requests is answered with Detokenizer404."""
        self._states = {rid: state for rid, state in self._states.items() if state.frontend != frontend}

    def _enter(self, epoch: int) -> bool:
        if epoch < self._epoch:
            now = time.monotonic()
            self._earlier_since = self._earlier_since or now
            if now - self._earlier_since < BACK_S:
                self._meter.inc("llmd_wire_stale_messages_total", channel="detokenizer")
                return False
        self._epoch, self._earlier_since = epoch, None
        self._states.clear()
        self._ended.clear()
        self._out.clear()
        self._unknown.clear()
        return True

    def _take(self, chunk: TokenChunk) -> None:
        rid = chunk.rid
        state = self._states.get(rid)
        if chunk.start is not None:
            if not 0 <= chunk.frontend < self._frontends:
                self._meter.inc("llmd_wire_bad_frames_total", channel="detokenizer")
                return
            self._ended.pop(rid, None)
            self._unknown.pop(rid, None)
            state = self._states[rid] = RequestState(self._table, chunk.frontend, chunk.first, chunk.start)
        if state is None:
            self._take_unknown(chunk)
            return
        try:
            text = state.take(chunk)
        except Gap:
            del self._states[rid]
            self._unknown[rid] = state.frontend
            return
        if text is None:
            return
        self._out.setdefault(state.frontend, []).append(text)
        if text.finish is not None:
            del self._states[rid]
            if chunk.finish is None:
                self._end(rid)

    def _take_unknown(self, chunk: TokenChunk) -> None:
        if chunk.rid not in self._ended:
            if 0 <= chunk.frontend < self._frontends:
                self._unknown[chunk.rid] = chunk.frontend
        elif chunk.finish is not None:
            del self._ended[chunk.rid]

    def _end(self, rid: str) -> None:
        """A stop string ended it here; the scheduler goes on until the frontend's abort reaches it."""
        if len(self._ended) >= MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[rid] = None
