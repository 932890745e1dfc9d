"""How much work a chunk is, and a chunk cut into pieces of which none is much. Output that is sent again can be a whole context at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from llmd.wire.messages import TokenChunk, TokenLogprob

#: Tokens of one piece.
PIECE: Final = 256


def pieces(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """The same output in chunks of at most `PIECE` tokens, each with its own logprobs. Those of the prompt stay whole."""
    ids, count = chunk.token_ids, len(chunk.token_ids)
    if count <= PIECE:
        yield chunk
        return
    logprobs = chunk.logprobs or []
    missing = count - len(logprobs)
    for at in range(0, count, PIECE):
        to = min(count, at + PIECE)
        own = logprobs[max(0, at - missing) : max(0, to - missing)] or None
        first, last = at == 0, to == count
        yield replace(
            chunk,
            first=chunk.first + at,
            token_ids=ids[at:to],
            logprobs=own,
            start=chunk.start if first else None,
            prompt_logprobs=chunk.prompt_logprobs if first else None,
            finish=chunk.finish if last else None,
        )


def weight_of(chunk: TokenChunk) -> int:
    """Tokens and alternatives, roughly."""
    if chunk.logprobs is None and chunk.prompt_logprobs is None:
        return 1 + len(chunk.token_ids)
    return 1 + len(chunk.token_ids) + _entries(chunk.logprobs) + _entries(chunk.prompt_logprobs)


def _entries(logprobs: list[TokenLogprob] | None) -> int:
    return len(logprobs) * (1 + len(logprobs[-1].top)) if logprobs else 0
