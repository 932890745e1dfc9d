"""`DecodeManager`: the running requests, and who steps back when KV runs out."""

from __future__ import annotations

import logging
import time

from llmd.observability.totals import Meter
from llmd.scheduler.estimate import NewTokenRatio
from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)


class DecodeManager:
    """Running requests by rid, in order of admission."""

    def __init__(self, kv: KvManager, waiting: WaitingQueue, meter: Meter) -> None:
        self._kv = kv
        self._waiting = waiting
        self._meter = meter
        self.running: dict[str, Req] = {}
        self.ratio = NewTokenRatio()

    def schedule(self, batch: ScheduleBatch, context_length: int) -> None:
        """Add one token of each request whose prompt is computed.

        When cached pages are used up too, the least worthy is retracted until the others have their page. The worthiest never is.
        """
        order = sorted(self.running.values(), key=self._waiting.worth)
        end, index = len(order), 0
        while index < end:
            req = order[index]
            index += 1
            if req.pending != 1 or req.ending(context_length):  # its prompt is still being computed, or its last token
                continue
            while not self._kv.grow(req, req.length):
                end -= 1
                self.retract(order[end])
                if order[end] is req:
                    break
            else:
                batch.add(req, 1, prefill=False)
        if end < len(order):
            self.ratio.retracted(self.running.values())
        elif batch.reqs:
            self.ratio.decoded()

    def retract(self, req: Req, *, keep: bool = True, for_memory: bool = True) -> None:
        """Back into the queue without its KV; its tokens stay, and it goes on from them later. `keep`: what it has computed may be used again.

        `for_memory`: it makes room for others, which is what the metric counts.
        """
        del self.running[req.rid]
        self._kv.release(req, keep=keep)
        req.queued = time.monotonic()
        self._waiting.push_back(req)
        if for_memory:
            self._meter.inc("llmd_requests_retracted_total")
        log.debug("retracted after %d tokens", len(req.output_ids), extra={"rid": req.rid})

    def pop(self, rid: str, *, keep: bool = True) -> Req | None:
        """Take one out and give its KV back; others may use it from the prefix tree unless `keep` is False."""
        req = self.running.pop(rid, None)
        if req is not None:
            self._kv.release(req, keep=keep)
        return req
