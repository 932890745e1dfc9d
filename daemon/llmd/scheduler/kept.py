"""`Kept`: output that has been sent and may have to be sent again, because a detokenizer can be lost with all that it held.

A request is here from its first chunk until its frontend acknowledges its finish, or forgets it. What has finished holds no KV; of
these the oldest go when they are too many: their frontend would have them computed again from the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmd.scheduler.req import Req
from llmd.wire.messages import TokenChunk, TokenLogprob

#: Tokens, prompts included, of finished requests that are kept.
MAX_TOKENS = 262_144

#: Logprobs wait packed: as objects, a token with twenty alternatives has kilobytes.
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


class Kept:
    """Requests by rid."""

    def __init__(self) -> None:
        self._reqs: dict[str, Req] = {}
        self._finished: dict[str, int] = {}
        """rid -> its tokens, oldest first."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def get(self, rid: str) -> Req | None:
        return self._reqs.get(rid)

    def sent(self, req: Req, chunk: TokenChunk) -> None:
        """`chunk` is on its way."""
        if chunk.start is not None:
            self.drop(req.rid)
            self._reqs[req.rid] = req
        if chunk.logprobs:
            req.sent_logprobs += [_pack([entry]) for entry in chunk.logprobs]
        if chunk.prompt_logprobs:
            req.sent_prompt_logprobs = _pack(chunk.prompt_logprobs)
        if chunk.finish is not None and req.rid in self._reqs:
            self._finished[req.rid] = req.length
            self._tokens += req.length
            while self._tokens > MAX_TOKENS and len(self._finished) > 1:
                self.drop(next(iter(self._finished)))

    def drop(self, rid: str) -> None:
        """Nobody will ask for `rid` any more."""
        self._reqs.pop(rid, None)
        self._tokens -= self._finished.pop(rid, 0)

    def drop_owned(self, owned: Callable[[Req], bool]) -> None:
        """A frontend is gone, and with it all who could ask for what it owned."""
        for rid in [rid for rid, req in self._reqs.items() if owned(req)]:
            self.drop(rid)


def again(req: Req, known: int, context_length: int) -> TokenChunk:
    """All output of `req` so far, of which its frontend has `known` tokens: it needs no logprobs of those."""
    source = req.source
    missing = max(0, len(req.output_ids) - known)
    logprobs = None
    if missing and source.logprobs >= 0:
        logprobs = [entry for packed in req.sent_logprobs[-missing:] for entry in _unpack(packed)]
    prompt = _unpack(req.sent_prompt_logprobs) if req.sent_prompt_logprobs and not known else None
    finish = req.finish(context_length) if req.done else None
    return TokenChunk(req.rid, source.frontend, 0, list(req.output_ids), finish, logprobs, source.detokenize, prompt, req.cached_tokens)
