"""`PrefillManager`: which prompts are computed in a step, in chunks, and who is admitted from the queue."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain, islice

from llmd.memory.radix_cache import TOKEN_BYTES
from llmd.observability.totals import Meter
from llmd.scheduler.decode import DecodeManager
from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.waiting import WaitingQueue

#: A prompt waits for another that is computing so many tokens of its own right now, to take them over instead.
SHARE_TOKENS = 32
_BEGINNING = SHARE_TOKENS * TOKEN_BYTES


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
        if head is None or self._fits(head, self._expected_by_running()):
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
            if self._fits(head, self._expected_by_running()):
                return

    def waiting_for_first(self, batch: ScheduleBatch) -> int:
        """How many wait for their first token who might compute beside the streams in `batch`: prompts that have begun, and what has a slot to begin."""
        begun = self._begun() if len(batch.reqs) < len(self._decode.running) else []
        free = min(max(0, self._max_running - len(self._decode.running)), self._kv.rows.available)
        return sum(req.pool is None and not req.output_ids for req in chain(begun, islice(self._waiting, free)))

    def schedule(self, batch: ScheduleBatch, chunk: int, admit: Callable[[Req], None]) -> None:
        """Add prompt tokens, `chunk` at most: first of begun prompts, then of newly admitted ones.

        `admit(req)` is told of each admission.
        """
        begun = self._begun() if len(batch.reqs) < len(self._decode.running) else []
        for req in begun:
            self._take(batch, req, chunk)
        if not self._slot_free or not len(self._waiting):
            return
        beginnings: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for req in begun:
            beginnings[req.prompt_key[:_BEGINNING]].append(req.prompt_key)
        expected = self._expected_by_running()
        while batch.prefill_tokens < chunk and self._slot_free and (head := self._waiting.head(time.monotonic())) is not None:
            if self._better_later(head, beginnings) or not self._fits(head, expected):
                return
            self._waiting.pop(head.rid)
            admit(head)
            if not self._start(head):
                return
            beginnings[head.prompt_key[:_BEGINNING]].append(head.prompt_key)
            expected += self._expected_pages(head)
            self._take(batch, head, chunk)

    def schedule_only(self, batch: ScheduleBatch, req: Req, chunk: int, admit: Callable[[Req], None]) -> None:
        """The same for this request, which waits or runs and has room, and no other."""
        if req.rid in self._decode.running:
            if not req.ending(self._context_length) and self._kv.grow(req, req.length):
                batch.add(req, req.pending if req.wants_prompt_logprobs else min(req.pending, chunk), prefill=req.pending > 1)
            return
        self._waiting.pop(req.rid)
        admit(req)
        if self._start(req):
            self._take(batch, req, chunk)

    def has_room(self, req: Req) -> bool:
        """Whether `req`, which waits or runs, has a slot, and pages for its tokens."""
        known, cached = (0, 0) if req.rid in self._decode.running else self._kv.known_pages(req)
        slot = req.rid in self._decode.running or self._slot_free
        return slot and self._kv.missing_pages(req, req.length) - known <= self._kv.pages_available - cached

    def _start(self, req: Req) -> bool:
        """Give it what it needs to run; False, and it waits again, when that is not to be had."""
        self._kv.reuse(req)
        self._decode.running[req.rid] = req
        if not self._kv.grow(req, req.length):
            self._decode.retract(req)
            return False
        self._count_reuse(req)
        return True

    def _begun(self) -> list[Req]:
        """Running requests whose prompt is not all computed."""
        return sorted((req for req in self._decode.running.values() if req.pending > 1 and not req.ending(self._context_length)), key=self._waiting.worth)

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

    @property
    def _slot_free(self) -> bool:
        return len(self._decode.running) < self._max_running and self._kv.rows.available > 0

    def _better_later(self, req: Req, beginnings: Mapping[bytes, list[bytes]]) -> bool:
        """Whether one of the prompts that are being computed, here by their beginnings, will soon give much of this one's KV to the tree."""
        alike = beginnings.get(req.prompt_key[:_BEGINNING])
        if self._kv.cache is None or not alike or req.reuses_nothing:
            return False
        wanted = self._kv.known_pages(req)[0] * self._kv.pages.page_size * TOKEN_BYTES + _BEGINNING
        return len(req.prompt_key) >= wanted and any(other.startswith(req.prompt_key[:wanted]) for other in alike)

    def _fits(self, req: Req, expected: int) -> bool:
        """Whether `req` has a slot, and pages for its tokens and what all are expected to generate. Alone, it needs no more than its tokens.

        `expected`: pages that those who run are expected to take still.
        """
        running = self._decode.running
        if not self._slot_free:
            return False
        known, cached = self._kv.known_pages(req)
        available = self._kv.pages_available - cached
        if not running:
            return self._kv.pages.pages_for(req.length) - known <= available
        return expected + self._expected_pages(req) - known <= available

    def _expected_by_running(self) -> int:
        return sum(self._expected_pages(req) for req in self._decode.running.values())

    def _expected_pages(self, req: Req) -> int:
        """Pages that `req` will still take, known ones included."""
        return self._kv.missing_pages(req, min(req.length + self._decode.ratio.expected_tokens(req), self._context_length))
