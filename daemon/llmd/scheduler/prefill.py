"""`PrefillManager`: which prompts are computed in a step, in chunks, and who is admitted from the queue."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmd.memory.radix_cache import common_tokens
from llmd.observability.totals import Meter
from llmd.scheduler.decode import DecodeManager
from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.waiting import WaitingQueue

#: A prompt waits for another that is computing so many tokens of its own right now, to take them over instead.
SHARE_TOKENS = 32


class PrefillManager:
    """In the queue's order: while its head does not fit, nobody passes it."""

    def __init__(self, kv: KvManager, waiting: WaitingQueue, decode: DecodeManager, meter: Meter, *, max_running: int, context_length: int) -> None:
        self._kv = kv
        self._waiting = waiting
        self._decode = decode
        self._meter = meter
        self._max_running = max_running
        self._context_length = context_length

    def make_way(self) -> None:
        """Send running requests back to the queue for a head that the policy puts before them and that can run in their place."""
        head = self._waiting.head(time.monotonic()) if self._waiting.preempts else None
        if head is None or self._fits(head):
            return
        victims, kept = [], 0
        for req in self._decode.running.values():
            if self._waiting.may_preempt(head, req):
                victims.append(req)
            else:
                kept += len(req.pages) + self._expected_pages(req)
        if kept + self._expected_pages(head) > self._kv.pages.pages_total:
            return
        for req in sorted(victims, key=self._waiting.worth, reverse=True):
            self._decode.retract(req)
            self._meter.inc("llmd_requests_preempted_total")
            if self._fits(head):
                return

    def schedule(self, batch: ScheduleBatch, chunk: int, admit: Callable[[Req], bool]) -> None:
        """Add prompt tokens, `chunk` at most: first of begun prompts, then of newly admitted ones.

        `admit(req)` is told of each admission; False: the request is no more.
        """
        begun = sorted((req for req in self._decode.running.values() if req.pending > 1 and not req.ending(self._context_length)), key=self._waiting.worth)
        for req in begun:
            self._take(batch, req, chunk)
        while batch.prefill_tokens < chunk and (head := self._waiting.head(time.monotonic())) is not None:
            if self._better_later(head, begun) or not self._fits(head):
                return
            self._waiting.pop(head.rid)
            if not admit(head):
                continue
            self._kv.reuse(head)
            self._decode.running[head.rid] = head
            if not self._kv.grow(head, head.length):
                self._decode.retract(head)
                return
            self._count_reuse(head)
            begun.append(head)
            self._take(batch, head, chunk)

    def _count_reuse(self, req: Req) -> None:
        """Once a request: a retracted one finds its own tokens."""
        if req.started is not None:
            return
        req.started = time.monotonic()
        tokens = len(req.source.input_ids)
        req.cached_tokens = min(req.computed, (tokens - 1) // self._kv.pages.page_size * self._kv.pages.page_size)
        if self._kv.cache is not None:
            self._meter.inc("llmd_prefix_cache_queried_tokens_total", tokens)
            self._meter.inc("llmd_prefix_cache_hit_tokens_total", req.cached_tokens)

    def _take(self, batch: ScheduleBatch, req: Req, chunk: int) -> None:
        """A prompt whose logprobs are wanted is not cut: the runner needs each token's successor."""
        left = chunk - batch.prefill_tokens
        if left > 0:
            batch.add(req, req.pending if req.wants_prompt_logprobs else min(req.pending, left), prefill=True)

    def _better_later(self, req: Req, begun: list[Req]) -> bool:
        """Whether one of the prompts that are being computed will soon give much of this one's KV to the tree."""
        if self._kv.cache is None or not begun or req.wants_prompt_logprobs:
            return False
        known = self._kv.known_pages(req)[0] * self._kv.pages.page_size
        return any(common_tokens(req.prompt_key, other.prompt_key) - known >= SHARE_TOKENS for other in begun)

    def _fits(self, req: Req) -> bool:
        """Whether `req` has a slot, and pages for its tokens and what all are expected to generate. Alone, it needs no more than its tokens."""
        running = self._decode.running
        if len(running) >= self._max_running or not self._kv.rows.available:
            return False
        known, cached = self._kv.known_pages(req)
        available = self._kv.pages_available - cached
        if not running:
            return self._kv.pages.pages_for(req.length) - known <= available
        return sum(self._expected_pages(other) for other in running.values()) + self._expected_pages(req) - known <= available

    def _expected_pages(self, req: Req) -> int:
        """Pages that `req` will still take, known ones included."""
        return self._kv.missing_pages(req, min(req.length + self._decode.ratio.expected_tokens(req), self._context_length))
