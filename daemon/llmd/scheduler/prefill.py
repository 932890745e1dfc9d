"""`PrefillManager`: which prompts are computed in a step, in chunks, and who is admitted from the queue."""

from __future__ import annotations

from collections.abc import Callable

from llmd.scheduler.decode import DecodeManager
from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.waiting import WaitingQueue

#: Room for so many further tokens of every running request is kept when a new one is admitted: less, and admission and
#: retraction would chase each other; more, and memory would lie idle.
RESERVE_TOKENS = 64


class PrefillManager:
    """Strict order of arrival: while the head of the queue does not fit, nobody passes it."""

    def __init__(self, kv: KvManager, waiting: WaitingQueue, decode: DecodeManager, *, chunk: int, max_running: int, context_length: int) -> None:
        self._kv = kv
        self._waiting = waiting
        self._decode = decode
        self._chunk = chunk
        self._max_running = max_running
        self._context_length = context_length

    def schedule(self, batch: ScheduleBatch, admit: Callable[[Req], bool]) -> None:
        """Add prompt tokens, `chunk` at most: first of begun prompts, then of newly admitted ones.

        `admit(req)` is told of each admission; False: the request is no more.
        """
        for req in self._decode.running.values():
            if req.pending > 1:
                self._take(batch, req)
        while batch.prefill_tokens < self._chunk and (head := self._waiting.head) is not None and self._fits(head):
            self._waiting.pop(head.rid)
            if admit(head) and self._kv.grow(head, head.length):
                self._decode.running[head.rid] = head
                self._take(batch, head)

    def _take(self, batch: ScheduleBatch, req: Req) -> None:
        """A prompt whose logprobs are wanted is not cut: the runner needs each token's successor."""
        left = self._chunk - batch.prefill_tokens
        if left > 0:
            batch.add(req, req.pending if req.wants_prompt_logprobs else min(req.pending, left), prefill=True)

    def _fits(self, req: Req) -> bool:
        """Whether `req` has a slot, and pages for all its tokens and everyone's reserve. Alone, it needs no reserve."""
        running = self._decode.running
        if len(running) >= self._max_running or not self._kv.rows.available:
            return False
        free = self._kv.pages.pages_free
        if not running:
            return self._kv.missing_pages(req, req.length) <= free
        return sum(self._with_reserve(other) for other in running.values()) + self._with_reserve(req) <= free

    def _with_reserve(self, req: Req) -> int:
        return self._kv.missing_pages(req, min(req.length + max(0, min(req.remaining, RESERVE_TOKENS)), self._context_length))
