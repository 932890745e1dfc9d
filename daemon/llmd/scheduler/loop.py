"""`Scheduler`: receive, schedule, forward, process the result; and wait when there is nothing to do.

One thread owns all of it. A fault in one request's handling costs that request; a step that fails costs the requests of that
step, as long as the KV accounting can be restored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from llmd import failpoints
from llmd.model.batch import Runner, SampleResult
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.scheduler.ahead import Ahead
from llmd.scheduler.arrivals import Arrivals, Limits, Refusal
from llmd.scheduler.chunk import ChunkSizer
from llmd.scheduler.compute import Compute, Step
from llmd.scheduler.decode import DecodeManager
from llmd.scheduler.input import Input
from llmd.scheduler.isolation import Isolation
from llmd.scheduler.journal import Journal
from llmd.scheduler.kept import Kept, again
from llmd.scheduler.kv import KvManager
from llmd.scheduler.output import Output
from llmd.scheduler.prefill import PrefillManager
from llmd.scheduler.req import Req
from llmd.scheduler.results import chunk_of, vectors_of
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.suspects import Suspects
from llmd.scheduler.waiting import WaitingQueue
from llmd.wire.messages import AbortReq, Ack, Command, Embedding, Resend, TokenChunk, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

CommandHandler = Callable[[Command], None]

log = logging.getLogger(__name__)

#: How often a blocked loop shows that it lives, and the longest it sleeps while requests wait without a reason to be woken.
_BLOCKED_BEAT = 0.1
#: Idle for so long, the books are checked page by page: that takes a while, and a request may come right after the last one.
_AUDIT_AFTER = 1.0
_INTERNAL = Refusal("internal_error", "the server made an error; its log has the details")
_CRASH = Refusal("engine_crash", "this request has ended the engine again and again, and is not tried any more")


class Scheduler:
    """Composed of the managers, which hold the state."""

    def __init__(
        self,
        runner: Runner,
        kv: KvManager,
        source: Input,
        output: Output,
        *,
        limits: Limits,
        chunk: int | None,
        meter: Meter,
        pulse: Pulse,
        waiting: WaitingQueue,
        overlap: bool,
        suspects: Suspects | None = None,
        journal: Journal | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`chunk`: prompt tokens of a step, None: as many as suit the streams beside them. `overlap`: prepare a step while the last computes."""
        self._compute = Compute(runner, overlap=overlap)
        self._input = source
        self._output = output
        self._limits = limits
        self._meter = meter
        self._pulse = pulse
        self._busy = False
        self._resuming = False
        self.launched: Step | None = None
        """The step on its way; without overlap none is, between two turns of the loop."""
        self._audit_at: float | None = None
        self._ahead = ahead
        self.kv = kv
        self.waiting = waiting
        self.decode = DecodeManager(kv, waiting, meter)
        self._prefill = PrefillManager(kv, waiting, self.decode, meter, max_running=limits.max_running, context_length=limits.context_length)
        self._chunk = ChunkSizer(chunk)
        self._arrivals = Arrivals(limits, kv)
        self._kept = Kept()
        self.suspects = suspects or Suspects(None)
        self._isolation = Isolation(self.suspects, journal, self.decode, waiting)

    # ------------------------------------------------------------ the loop

    def run(self, on_command: CommandHandler) -> None:
        """Work until the process ends."""
        while True:
            self.receive(on_command)
            batch = self.schedule()
            if batch.reqs or self.launched:
                self.step(batch)
            else:
                self.rest()

    def receive(self, on_command: CommandHandler) -> None:
        """Take in all that has come, and end what has waited or run for too long."""
        self._output.flush()
        for command in self._input.commands():
            on_command(command)
        for message in self._input.messages():
            match message:
                case AbortReq():
                    self.abort(message.rid)
                case Ack():
                    self._kept.drop(message.rid)
                case Resend():
                    self._resend(message.request)
                case _:
                    self._arrive(message)
        self._expire()

    def schedule(self) -> ScheduleBatch:
        """Who computes how many tokens next; empty when nothing can run."""
        batch = ScheduleBatch()
        suspect = self._isolation.suspect()
        if suspect is not None:
            self._schedule_alone(batch, suspect)
        elif not self._output.blocked:
            self._prefill.make_way()
            self.decode.schedule(batch, self._limits.context_length)
            batch.streams = len(batch.reqs)
            batch.hurried = self._resuming and self._still_resuming()
            batch.chunk = self._chunk.next(0 if batch.hurried else batch.streams, self._prefill.waiting_for_first(batch))
            self._prefill.schedule(batch, batch.chunk.tokens, self._admit)
        return batch

    def _still_resuming(self) -> bool:
        """Whether requests of an engine that is gone have not all caught up: clients wait for them in mid-sentence, so nobody's pace is spared meanwhile."""
        behind = (req for req in (*self.waiting, *self.decode.running.values()) if req.source.resumed)
        self._resuming = any(req.pending > 1 for req in behind)
        return self._resuming

    def _schedule_alone(self, batch: ScheduleBatch, suspect: Req) -> None:
        """Only `suspect` computes, once the step on its way is over."""
        on_its_way = self.launched.batch if self.launched is not None else ScheduleBatch()
        others = any(req is not suspect or stay < req.void for req, stay in zip(on_its_way.reqs, on_its_way.stays, strict=True))
        if self._output.blocked or others:
            return
        self._isolation.clear_the_way(suspect, self._prefill.has_room)
        self._prefill.schedule_only(batch, suspect, self._chunk.next(0).tokens, self._admit)

    def step(self, batch: ScheduleBatch) -> None:
        """Launch a batch, and process the result of the last one meanwhile; without overlap, its own."""
        self._busy = True
        self._pulse.begin()
        last, self.launched = self.launched, self._launch(batch) if batch.reqs else None
        if not self._compute.overlap:
            last, self.launched = self.launched, None
        if last is not None:
            self._process(last)
        if self.launched is None:
            self._isolation.end()
        self._pulse.end()

    def _launch(self, batch: ScheduleBatch) -> Step | None:
        try:
            self._isolation.begin(batch, self.launched.batch if self.launched else None)
            _hit_failpoints(batch)
            arrays = batch.forward_batch(self.kv.rows.req_to_token, detached=self._compute.overlap)
            step = Step(batch, arrays, batch.wanted())
            batch.launch(step.wanted)
            self._compute.launch(step)
        except Exception:
            log.exception("a step of %d requests could not be started", len(batch.reqs))
            self._failed(batch)
            return None
        return step

    def _process(self, step: Step) -> None:
        """Take in what a step brought, and send it."""
        batch = step.batch
        try:
            results = self._compute.wait(step)
            if len(results) != len(step.wanted):
                raise RuntimeError(f"the runner gave {len(results)} results for {len(step.wanted)} requests")
        except Exception:
            log.exception("a step of %d requests failed", len(batch.reqs))
            batch.undo(step.wanted)
            self._failed(batch)
            return
        try:
            batch.settle(step.wanted)
            for req, count in zip(batch.reqs, batch.extend_lens, strict=True):
                if count > 1 and req.settled:
                    self.kv.share(req)
            if batch.embeds:
                self._embed(batch)
            taken = [self._accept(batch, request.row, result) for request, result in zip(step.wanted, results, strict=True)]
            self._output.chunks([chunk for chunk in taken if chunk is not None])
            if not batch.hurried:
                self._chunk.observe(batch.streams, batch.prefill_tokens, step.seconds, batch.chunk)
        except Exception:
            log.exception("the results of a step of %d requests could not be taken in", len(batch.reqs))
            self._fail_batch(batch)
        self._isolation.got_on(batch)
        self._meter.observe("llmd_scheduler_step_seconds", step.seconds, phase=batch.phase)

    def _accept(self, batch: ScheduleBatch, row: int, result: SampleResult) -> TokenChunk | None:
        """Take one request's new token; None when it has ended, or does with an error."""
        req = batch.reqs[row]
        if req.done or batch.stays[row] < req.void:
            return None
        if not result.finite:
            self._not_finite(req)
            return None
        try:
            chunk = chunk_of(req, result, self._limits.context_length)
        except Exception:
            log.exception("a result could not be taken in", extra={"rid": req.rid})
            self.fail(req, _INTERNAL)
            return None
        if chunk.finish is not None:
            self._end(req)
        self._kept.sent(req, chunk)
        return chunk

    def _embed(self, batch: ScheduleBatch) -> None:
        """Send the vectors that a step completed."""
        found: list[tuple[int, Embedding]] = []
        for req, vector in vectors_of(batch):
            if vector is None:
                self._not_finite(req)
            else:
                self._end(req)
                found.append((req.source.frontend, Embedding(req.rid, vector)))
        self._output.embeddings(found)

    def _not_finite(self, req: Req) -> None:
        log.error("the model gave numbers that are not finite", extra={"rid": req.rid})
        self.fail(req, Refusal("non_finite_logits", "the model gave no finite result for this request"), keep=False)

    def _end(self, req: Req, *, keep: bool = True) -> None:
        """`req` is over, wherever it stands."""
        req.done = True
        if self.decode.pop(req.rid, keep=keep) is None:
            self.waiting.pop(req.rid)

    def rest(self) -> None:
        """Nothing can run: wait for whatever may change that. The books are checked when work has just ended, and again at leisure."""
        in_flight = self.in_flight
        until = self._next_deadline()
        if in_flight:
            until = min(until or float("inf"), time.monotonic() + _BLOCKED_BEAT)
            if self._output.blocked:
                self._pulse.begin("blocked on detokenizer")
        else:
            until = self._audit()
            if self._ahead is not None and self._ahead.take():
                until = 0.0
        self._input.wait(until, self._output.channels)
        if self._pulse.phase != "idle" and not (self._output.blocked and in_flight):
            self._pulse.end()

    def _audit(self) -> float | None:
        """Check the books while idle; returns when to look again."""
        now = time.monotonic()
        if self._busy:
            self._busy = False
            self.decode.ratio.idle()
            self.check_idle()
            self._audit_at = now + _AUDIT_AFTER
        elif self._audit_at is not None and now >= self._audit_at:
            self._audit_at = None
            self.check_idle(thoroughly=True)
        return self._audit_at

    def close(self) -> None:
        """No further step begins."""
        self._compute.close()
        self._isolation.close()

    # ------------------------------------------------------------ requests come and go

    def configure(self, limits: Limits) -> None:
        """Measure requests against other limits, those that are here too."""
        self._limits = limits
        self._arrivals.limits = limits

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self.decode.running) + len(self.waiting)

    def _arrive(self, source: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> None:
        if source.rid in self.waiting or source.rid in self.decode.running:
            self._meter.inc("llmd_requests_duplicate_total")
            return
        if self.suspects.refuses(source):
            self._meter.inc("llmd_requests_isolated_total")
            self._output.refuse(source.rid, source.frontend, _CRASH.code, _CRASH.message)
            return
        req = self._arrivals.make(source, self.in_flight)
        if isinstance(req, Refusal):
            self._output.refuse(source.rid, source.frontend, req.code, req.message, req.param)
        elif req.finish(self._limits.context_length) is not None and not req.wants_prompt_logprobs:
            req.done = req.announced = True
            chunk = again(req, len(req.output_ids), self._limits.context_length)
            self._kept.sent(req, chunk)
            self._output.chunks([chunk])
        elif source.resumed:
            self._resuming = True
            self.waiting.push_back(req)
        else:
            self.waiting.push(req)

    def _resend(self, source: TokenizedGenerateReqInput) -> None:
        """Its detokenizer is gone: send what there is again. Of a request that has no output yet nothing is lost."""
        req = self._kept.get(source.rid)
        if req is not None:
            self._output.chunks([again(req, len(source.output_ids), self._limits.context_length)])
        elif source.rid not in self.waiting and source.rid not in self.decode.running:
            self._arrive(source)

    def _admit(self, req: Req) -> None:
        """`req` leaves the queue to run."""
        now = time.monotonic()
        req.waited += now - req.queued
        if req.started is None:
            self._meter.observe("llmd_queue_time_seconds", now - req.arrived)

    def abort(self, rid: str, *, keep: bool = True) -> None:
        """Its frontend has forgotten `rid`. `keep`: what it has computed may serve others."""
        self._kept.drop(rid)
        if self.suspects.any:
            self.suspects.forget(rid)
        req = self.waiting.pop(rid) or self.decode.pop(rid, keep=keep)
        if req is not None:
            req.done = True
            if req.announced:
                self._output.forget(rid)

    def fail(self, req: Req, why: Refusal, *, keep: bool = True) -> None:
        """End `req` with an error."""
        self.abort(req.rid, keep=keep)
        self._output.refuse(req.rid, req.source.frontend, why.code, why.message, why.param)

    def frontend_gone(self, frontend: int, incarnation: int) -> int:
        """End all that a dead frontend and those before it owned; returns how many. Its successor's requests go on.

        The successor knows none of them, and ignores the errors.
        """

        def owned(req: Req) -> bool:
            return req.source.frontend == frontend and req.source.incarnation <= incarnation

        gone = [req for req in (*self.decode.running.values(), *self.waiting) if owned(req)]
        for req in gone:
            self.fail(req, Refusal("engine_unavailable", "the process that held this request has been replaced"))
        self._kept.drop_owned(owned)
        return len(gone)

    def _expire(self) -> None:
        now = time.monotonic()
        queue_limit, run_limit = self._limits.queue_timeout, self._limits.request_timeout
        while queue_limit is not None and (req := self.waiting.oldest_new) is not None and now - req.arrived >= queue_limit:
            self.fail(req, Refusal("queue_timeout", f"the request has waited for {queue_limit:g} s"))
        if run_limit is not None:
            for req in (*self.decode.running.values(), *self.waiting):
                if req.started is not None and now - req.started >= run_limit:
                    self.fail(req, Refusal("request_timeout", f"the request has run for {run_limit:g} s"))

    def _next_deadline(self) -> float | None:
        """When the first waiting request expires; what runs is looked at in each step."""
        limit, oldest = self._limits.queue_timeout, self.waiting.oldest_new
        return oldest.arrived + limit if limit is not None and oldest is not None else None

    # ------------------------------------------------------------ the books

    def _failed(self, batch: ScheduleBatch) -> None:
        """A step has failed: of several requests each is tried alone, and who fails alone gets the error."""
        if len(batch.reqs) == 1:
            self._fail_batch(batch)
            return
        self._isolation.failed(batch)
        self._check_books()

    def _fail_batch(self, batch: ScheduleBatch) -> None:
        """Give all requests of a step the error."""
        for req in batch.reqs:
            if not req.done:
                self.fail(req, _INTERNAL, keep=False)
        self._check_books()

    def _check_books(self) -> None:
        """Raises if the KV accounting is beyond repair: then the engine has to start anew."""
        if (wrong := self.kv.check(self.decode.running.values())) is not None:
            raise RuntimeError(f"KV accounting after a failed step: {wrong}")

    def check_idle(self, *, thoroughly: bool = False) -> None:
        """With nothing running every page is free or cached; else all are freed, which is logged and counted. Thoroughly: walks over the tree."""
        if (wrong := self.kv.check(()) if thoroughly else self.kv.check_idle()) is not None:
            log.error("KV accounting while idle: %s (%s, %d rows taken); put right by forgetting all KV", wrong, self.kv.counts, self.kv.rows.active)
            self._meter.inc("llmd_kv_accounting_errors_total")
            self.kv.heal()


def _hit_failpoints(batch: ScheduleBatch) -> None:
    """The step's place for faults, and one for each prompt that it computes."""
    failpoints.hit("scheduler.step")
    if failpoints.armed():
        for req, count in zip(batch.reqs, batch.extend_lens, strict=True):
            if count > 1 or not req.announced:
                failpoints.hit("scheduler.prompt", req.source.debug_text)
