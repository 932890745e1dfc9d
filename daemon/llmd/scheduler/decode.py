"""`DecodeManager`: the running requests, and who steps back when KV runs out."""

from __future__ import annotations

import logging

from llmd.observability.totals import Meter
from llmd.scheduler.kv import KvManager
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)


class DecodeManager:
    """Running requests in order of arrival (admission keeps that order). The youngest is retracted first, so the oldest always gets on."""

    def __init__(self, kv: KvManager, waiting: WaitingQueue, meter: Meter) -> None:
        self._kv = kv
        self._waiting = waiting
        self._meter = meter
        self.running: dict[str, Req] = {}

    def schedule(self, batch: ScheduleBatch) -> None:
        """Add one token of each request whose prompt is computed, retracting younger ones until each has its page."""
        for req in list(self.running.values()):
            if not req.row or req.pending != 1:  # retracted a moment ago, or a prompt that is still being computed
                continue
            while not self._kv.grow(req, req.length):
                youngest = next(reversed(self.running.values()))
                self.retract(youngest)
                if youngest is req:
                    break
            else:
                batch.add(req, 1, prefill=False)

    def retract(self, req: Req) -> None:
        """Back to the front of the queue without its KV; its tokens stay, and it goes on from them later."""
        del self.running[req.rid]
        self._kv.release(req)
        self._waiting.return_to_front(req)
        self._meter.inc("llmd_requests_retracted_total")
        log.debug("retracted after %d tokens: no KV page left", len(req.output_ids), extra={"rid": req.rid})

    def pop(self, rid: str) -> Req | None:
        """Take one out and give its KV back."""
        req = self.running.pop(rid, None)
        if req is not None:
            self._kv.release(req)
        return req
