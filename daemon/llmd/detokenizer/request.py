"""`RequestState`: one request's way from token ids to text; lives from its first chunk to its finish."""

from __future__ import annotations

from llmd.detokenizer.stops import StopMatcher
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire.messages import DetokenizeParams, Finish, TextChunk, TokenChunk, TokenLogprob


class Gap(Exception):
    """Tokens are missing between what is known of a request and its new chunk."""


class RequestState:
    """Text comes out when its characters are whole and no stop string may begin in it; ids and logprobs wait for it.

    While a stop string is complete and one that starts before it may still come true, the tokens behind the one that completed it wait too.
    """

    __slots__ = (
        "_at",
        "_cached",
        "_decoder",
        "_first",
        "_ids",
        "_include_stop",
        "_logprobs",
        "_prompt_logprobs",
        "_stops",
        "_table",
        "frontend",
    )

    def __init__(self, table: TokenBytes, frontend: int, first: int, params: DetokenizeParams) -> None:
        self.frontend = frontend
        self._table = table
        self._decoder = table.decoder(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, params.min_tokens) if any(params.stop) else None
        self._include_stop = params.include_stop
        self._first = first
        self._at = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._cached = 0

    def take(self, chunk: TokenChunk) -> TextChunk | None:
        """Take new tokens in; what there is to send, if anything. A chunk with `finish` set is the last one.

        Tokens that were taken in before are skipped. Raises Gap. What stopped the request, string or token,
        is no part of the text unless it asked for that.
        """
        known = self._first + len(self._ids) - chunk.first
        if known < 0:
            raise Gap
        ids = chunk.token_ids[known:] if known else chunk.token_ids
        text = self._text(ids, chunk.finish)
        self._ids += ids
        if chunk.logprobs:
            # They are those of the chunk's last tokens, of which some may be known.
            missing = len(chunk.token_ids) - len(chunk.logprobs)
            self._logprobs = (self._logprobs or []) + self._named(chunk.logprobs[max(0, known - missing) :])
        if chunk.prompt_logprobs:
            self._prompt_logprobs = self._named(chunk.prompt_logprobs)
        self._cached = chunk.cached_tokens or self._cached
        stops = self._stops
        finish = chunk.finish if stops is None or stops.matched is None else Finish("stop", stops.matched)
        if not text and finish is None:
            return None
        return self._emit(chunk.rid, text, finish)

    def _text(self, ids: list[int], finish: Finish | None) -> str:
        """Text that is certain now; where a stop string ends it, `_stops` says so."""
        stops, decoder = self._stops, self._decoder
        stopped = finish is not None and finish.reason == "stop" and bool(ids) and ids[-1] == finish.matched
        visible = ids[:-1] if stopped and not self._include_stop else ids
        if stops is None:
            text = decoder.feed(visible)
            return text + decoder.flush() if finish is not None else text
        out = ""
        known = self._first + len(self._ids)
        for count, id in enumerate(visible, known + 1):
            out += stops.feed(decoder.feed([id]), count)
            if stops.matched is not None:
                break
        else:
            if finish is not None:
                out += stops.feed(decoder.flush(), known + len(ids))
                out += stops.flush()
        return out + stops.matched if self._include_stop and stops.matched is not None else out

    def _named(self, entries: list[TokenLogprob]) -> list[TokenLogprob]:
        raw = self._table.raw
        return [TokenLogprob(e.token_id, e.logprob, e.top, raw(e.token_id), tuple([raw(id) for id, _ in e.top])) for e in entries]

    def _emit(self, rid: str, text: str, finish: Finish | None) -> TextChunk:
        ids, logprobs = self._ids, self._logprobs
        self._ids, self._logprobs = [], None
        if self._stops is not None and self._stops.ended is not None:
            behind = self._first + len(ids) - self._stops.ended
            if behind:
                ids, self._ids = ids[:-behind], ids[-behind:]
                logprobs, self._logprobs = (logprobs[:-behind] or None, logprobs[-behind:]) if logprobs else (None, None)
        chunk = TextChunk(rid, self._first, text, ids, finish, logprobs, self._prompt_logprobs, self._cached, self._at)
        self._first += len(ids)
        self._at += len(text)
        self._prompt_logprobs = None
        return chunk
