"""`Arrivals`: what becomes of a request when it comes in: refused at once, finished at once, or queued."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req, new_req
from llmd.wire.messages import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

#: Those that another engine had taken before are older than all that arrives here.
_RESUMED = -(2**40)


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are measured against."""

    context_length: int
    vocab_size: int
    max_running: int
    max_queued: int
    queue_timeout: float | None
    request_timeout: float | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error a client gets."""

    code: str
    message: str
    param: str | None = None


class Arrivals:
    """Makes requests of messages."""

    def __init__(self, limits: Limits, kv: KvManager) -> None:
        self.limits = limits
        self._kv = kv
        self._count = 0

    def make(self, source: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, in_flight: int) -> Req | Refusal:
        """A request, or why it can't be one. `in_flight`: how many run or wait now."""
        refusal = self._never(source) or (None if source.resumed else self._not_now(in_flight))
        if refusal is not None:
            return refusal
        self._count += 1
        order = self._count + (_RESUMED if source.resumed else 0)
        return new_req(source, time.monotonic(), order, self.limits.eos_token_ids)

    def _never(self, source: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> Refusal | None:
        """The frontends have checked all this; here it keeps a wrong frontend from costing other requests."""
        limits = self.limits
        ids = source.input_ids
        known, most = (source.output_ids, source.sampling.max_new_tokens) if isinstance(source, TokenizedGenerateReqInput) else ([], 0)
        if not ids or min(ids) < 0 or max(ids) >= limits.vocab_size or any(not 0 <= token < limits.vocab_size for token in known):
            return Refusal("invalid_request", f"the prompt must hold token ids from 0 to {limits.vocab_size - 1}, at least one", "prompt")
        room = limits.context_length - len(ids)
        if room < min(1, most):
            return Refusal("context_length_exceeded", f"the prompt has {len(ids)} tokens, the context {limits.context_length}", "prompt")
        longest = len(ids) + min(room, most)
        if longest > self._kv.capacity_tokens:
            message = f"prompt and output of up to {longest} tokens never fit into the KV pool of {self._kv.capacity_tokens}"
            return Refusal("exceeds_kv_capacity", message, "prompt")
        return None

    def _not_now(self, in_flight: int) -> Refusal | None:
        """The queue is full when all running slots and all queue places are taken; a request bound for a free slot takes no queue place."""
        limits = self.limits
        if in_flight >= limits.max_running + limits.max_queued:
            return Refusal("queue_full", f"{limits.max_queued} requests are waiting already")
        return None
