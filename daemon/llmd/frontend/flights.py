"""`Flights`: every request that is with the engine, and how it gets there again when the engine or the detokenizer is lost.

A request is kept whole until its last piece has been delivered: its prompt, its parameters, its seed, every token and the length of the
text that came. A new engine gets it with these tokens and goes on; a new detokenizer has its output sent again, from the first token on.
What a frontend then has already is cut off, so every token and every character is delivered once. Messages of another engine
than the one that is connected are dropped and counted. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import msgspec

from llmd.errors import RequestError
from llmd.frontend.channels import Incoming, SchedulerPort
from llmd.frontend.engine_view import EngineView, engine_unavailable
from llmd.frontend.feeding import AGAIN_S as FEED_AGAIN_S
from llmd.frontend.feeding import Feed, share
from llmd.frontend.replays import Replays
from llmd.frontend.req_state import Generation, ReqState, Submitted
from llmd.observability.totals import Meter
from llmd.wire.messages import (
    AbortReq,
    Ack,
    BatchEmbeddingOutput,
    BatchStrOutput,
    Detokenizer404,
    Embedding,
    Finish,
    Resend,
    TextChunk,
    TokenizedGenerateReqInput,
    TokenLogprob,
)

log = logging.getLogger(__name__)

#: Seconds until output that was asked for again, and of which nothing has come, is asked for once more.
AGAIN_S: Final = 1.0
#: Requests that are over, or were never here, and are remembered so that the scheduler is told once.
MAX_OVER: Final = 1024
#: Seconds beyond `supervision.helper_timeout` until a detokenizer that hangs has been replaced.
REPLACED_S: Final = 5.0


class Flight:
    """One rid with the engine."""

    __slots__ = ("asked_at", "chars", "epoch", "heard_at", "state", "weights")

    def __init__(self, state: ReqState, weights: str) -> None:
        self.state = state
        self.weights = weights
        """The weights that made its tokens."""
        self.epoch = 0
        """The engine that has it; 0: none yet."""
        self.chars = 0
        """Length of the text delivered."""
        self.asked_at = 0.0
        """When its output was last asked for again."""
        self.heard_at = 0.0
        """When its last piece came."""


class Flights:
    """In the order of their submission. Used in the event loop only."""

    def __init__(self, view: EngineView, port: SchedulerPort, meter: Meter) -> None:
        self._view = view
        self._port = port
        self._meter = meter
        self._gaps = meter.histogram("llmd_inter_token_latency_seconds")
        self._flights: dict[str, Flight] = {}
        self._feeds: dict[str, Feed] = {}
        """Of requests with many choices, by the Generation's rid."""
        self._detokenizer = 0
        self._replays = Replays(self._replay, lambda: view.supervision.helper_timeout + REPLACED_S)
        self._recovering: set[str] = set()
        """Generations that have been submitted or asked for again, and of which nothing has come since."""
        self._over: dict[str, None] = {}
        self._patience: asyncio.TimerHandle | None = None

    def __contains__(self, rid: str) -> bool:
        return rid in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def states(self) -> list[ReqState]:
        """Every choice that is not over. Any thread may ask."""
        return [flight.state for flight in list(self._flights.values())]

    @property
    def generations(self) -> list[Generation]:
        """All that are not over."""
        found = {id(f.state.generation): f.state.generation for f in self._flights.values()}
        return list((found | {id(f.generation): f.generation for f in self._feeds.values()}).values())

    # ------------------------------------------------------------ requests come and go

    def begin(self, generation: Generation) -> None:
        """Take a request over, with all its choices. While no engine is there they wait for the next one."""
        most = share(self._view)
        if len(generation.choices) <= most:
            for state in generation.choices:
                self._begin(state)
        else:
            self._feeds[generation.rid] = Feed(generation, most, self._view.weights_version)
            self._feed(generation)

    def _feed(self, generation: Generation) -> None:
        """Send what may go now of a request that goes piece by piece."""
        feed = self._feeds.get(generation.rid)
        if feed is None:
            return
        if feed.weights != self._view.weights_version:
            self._end_reloaded(generation)
            return
        while (state := feed.next()) is not None:
            self._begin(state)

    def _choice_over(self, generation: Generation) -> None:
        feed = self._feeds.get(generation.rid)
        if feed is not None:
            feed.over()
            self._feed(generation)

    def _take_back(self, flight: Flight) -> bool:
        """A choice was refused because the queue is full: try it again later, if it is of a request that goes piece by piece and has begun to."""
        generation = flight.state.generation
        feed = self._feeds.get(generation.rid)
        if feed is None or not feed.take_back(flight.state):
            return False
        del self._flights[flight.state.request.rid]
        if feed.stuck:
            asyncio.get_running_loop().call_later(FEED_AGAIN_S, self._feed, generation)
        return True

    def _begin(self, state: ReqState) -> None:
        flight = self._flights[state.request.rid] = Flight(state, self._view.weights_version)
        if self._port.epoch:
            self._submit(flight, resumed=False)
        self._watch()

    def release(self, generation: Generation, why: str) -> None:
        """Forget a Generation; what still runs of it is aborted in the scheduler."""
        self._recovering.discard(generation.rid)
        self._feeds.pop(generation.rid, None)
        self._replays.over(generation.rid)
        for state in generation.choices:
            rid = state.request.rid
            flight = self._flights.pop(rid, None)
            if flight is not None:
                self._note_over(rid)
                self._abort(rid, flight.epoch, why)

    def fail_all(self, error: RequestError) -> None:
        """End every request with `error`; an engine that still lives need not compute them to their end."""
        for generation in self.generations:
            self.release(generation, error.code or "error")
            generation.fail(error)

    def undeliverable(self, rid: str) -> None:
        """The scheduler never took this request."""
        self._fail(rid, engine_unavailable())

    # ------------------------------------------------------------ the engine comes and goes

    def picture_changed(self) -> None:
        """There is a new picture of the daemon: what a process that is gone had goes to its successor."""
        view = self._view
        if view.scheduler_up and view.epoch != self._port.epoch:
            first = self._port.epoch == 0
            self._port.open(view.epoch)
            self._resubmit(resumed=not first)
        incarnation = view.life[1]
        if incarnation and incarnation != self._detokenizer:
            if self._detokenizer and self._flights:
                log.info("the detokenizer is another one: output is asked for again, of requests: %d", len(self._flights))
                self._detokenizer_lost()
            self._detokenizer = incarnation
        self._watch()

    def _detokenizer_lost(self) -> None:
        choices: dict[str, list[str]] = {}
        for rid, flight in self._flights.items():
            choices.setdefault(flight.state.generation.rid, []).append(rid)
        guilty = self._replays.lost(choices)
        for generation in self.generations if guilty is not None else ():
            if generation.rid == guilty:
                log.error("a request ends with engine_crash: detokenizers end when its output is sent", extra={"rid": guilty})
                self.release(generation, "engine_crash")
                generation.fail(RequestError("this request has ended the detokenizer again and again, and is not tried any more", code="engine_crash"))

    def _replay(self, generation_rid: str) -> None:
        for flight in list(self._flights.values()):
            if flight.state.generation.rid == generation_rid:
                self._ask_again(flight)

    def _resubmit(self, *, resumed: bool) -> None:
        """To the engine that has just been connected, in the order in which they came."""
        self._replays.forget()
        self._end_mixed()
        if resumed and self._flights:
            log.info("the engine is another one: requests that go on in it: %d", len(self._flights), extra={"epoch": self._port.epoch})
        for flight in list(self._flights.values()):
            self._submit(flight, resumed=resumed and flight.epoch != 0)

    def _end_mixed(self) -> None:
        """Text of two weights is never mixed, nor are vectors."""
        weights = self._view.weights_version
        for flight in list(self._flights.values()):
            generation = flight.state.generation
            if flight.weights != weights and (flight.state.output_ids or generation.has_vectors):
                self._end_reloaded(generation)
            flight.weights = weights

    def _end_reloaded(self, generation: Generation) -> None:
        self.release(generation, "reloaded")
        generation.fail(RequestError("other weights have been loaded", code="reloaded"))

    def _watch(self) -> None:
        """Nobody waits for a lost engine for longer than `supervision.recover_timeout`."""
        lost = bool(self._flights) and not self._view.engine_up
        if lost and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._view.supervision.recover_timeout, self._give_up)
        elif not lost and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        log.error("the engine has been away for too long: requests that end with engine_unavailable: %d", len(self._flights))
        self.fail_all(engine_unavailable())

    # ------------------------------------------------------------ to the scheduler

    def _submit(self, flight: Flight, *, resumed: bool) -> None:
        state = flight.state
        flight.epoch = self._port.epoch
        if resumed:
            self._recovering.add(state.generation.rid)
        self._port.send(self._as_it_stands(flight, resumed=resumed))

    def _as_it_stands(self, flight: Flight, *, resumed: bool) -> Submitted:
        """The request, to be gone on with from the tokens that have come."""
        request = flight.state.request
        if isinstance(request, TokenizedGenerateReqInput):
            return msgspec.structs.replace(request, epoch=flight.epoch, output_ids=list(flight.state.output_ids), resumed=resumed)
        return msgspec.structs.replace(request, epoch=flight.epoch, resumed=resumed)

    def _ask_again(self, flight: Flight) -> None:
        """Have all of its output sent again. A text to embed has none that a detokenizer could lose."""
        if self._replays.waits(flight.state.generation.rid):
            return
        request = self._as_it_stands(flight, resumed=True)
        if flight.epoch == 0 or flight.epoch != self._port.epoch or not isinstance(request, TokenizedGenerateReqInput):
            return
        flight.asked_at = time.monotonic()
        self._recovering.add(flight.state.generation.rid)
        self._port.send(Resend(epoch=flight.epoch, request=request))

    def _missing(self, flight: Flight) -> None:
        """Something of its output is not there. Where it has just been asked for again, that may be on its way."""
        left = flight.asked_at + AGAIN_S - time.monotonic()
        if left <= 0:
            self._ask_again(flight)
        else:
            asyncio.get_running_loop().call_later(left, self._ask_if_silent, flight, flight.asked_at)

    def _ask_if_silent(self, flight: Flight, asked_at: float) -> None:
        current = self._flights.get(flight.state.request.rid) is flight and flight.asked_at == asked_at
        if current and flight.heard_at < asked_at:
            self._ask_again(flight)

    def _abort(self, rid: str, epoch: int, why: str) -> None:
        if epoch and epoch == self._port.epoch:
            self._port.send(AbortReq(rid=rid, epoch=epoch, code=why))

    # ------------------------------------------------------------ from scheduler and detokenizer

    def receive(self, message: Incoming) -> None:
        """One message of the tokenizer channel."""
        if message.epoch != self._port.epoch:
            self._meter.inc("llmd_wire_stale_messages_total", channel="tokenizer")
            return
        match message:
            case BatchStrOutput():
                now, tokens = time.monotonic(), 0
                for chunk in message.chunks:
                    tokens += self._deliver(chunk, now)
                if tokens:
                    self._meter.inc("llmd_generation_tokens_total", tokens)
            case BatchEmbeddingOutput():
                for embedding in message.embeddings:
                    self._embedded(embedding)
            case AbortReq():
                self._refused(message)
            case Detokenizer404():
                flight = self._flights.get(message.rid)
                if flight is None:
                    self._disown(message.rid)
                else:
                    self._missing(flight)

    def _deliver(self, chunk: TextChunk, now: float) -> int:
        """Returns how many tokens the metrics count now: those of a stream."""
        flight = self._flights.get(chunk.rid)
        if flight is None:
            self._disown(chunk.rid)
            return 0
        state = flight.state
        generation = state.generation
        flight.heard_at = now
        self._replays.heard(generation.rid, chunk.rid)
        if chunk.first != len(state.output_ids) or chunk.at != flight.chars:
            new = self._unknown(flight, chunk)
            if new is None:
                return 0
            chunk = new
        if generation.rid in self._recovering:
            self._recovering.discard(generation.rid)
            if generation.metered:
                self._meter.inc("llmd_requests_recovered_total")
        counted = self._measure(state, len(chunk.token_ids), now) if generation.metered else 0
        flight.chars += len(chunk.text)
        state.put(chunk)
        if chunk.finish is not None:
            self._finished(flight, chunk.finish)
        return counted

    def _unknown(self, flight: Flight, chunk: TextChunk) -> TextChunk | None:
        """What of `chunk` has not been delivered; None: nothing, or something before it is missing."""
        known_ids, known_chars = len(flight.state.output_ids) - chunk.first, flight.chars - chunk.at
        if known_ids < 0 or known_chars < 0:
            self._missing(flight)
            return None
        chunk = _rest(chunk, known_ids, known_chars)
        return chunk if chunk.token_ids or chunk.text or chunk.finish is not None else None

    def _finished(self, flight: Flight, finish: Finish) -> None:
        rid = flight.state.request.rid
        del self._flights[rid]
        self._note_over(rid)
        if isinstance(finish.matched, str):
            self._abort(rid, flight.epoch, "stop_string")
        elif flight.epoch == self._port.epoch:
            self._port.send(Ack(rid=rid, epoch=flight.epoch))
        self._choice_over(flight.state.generation)
        if finish.reason == "abort":
            flight.state.generation.fail(RequestError("the request was aborted", code="aborted"))

    def _embedded(self, embedding: Embedding) -> None:
        flight = self._flights.pop(embedding.rid, None)
        if flight is not None:
            self._recovering.discard(flight.state.generation.rid)
            flight.state.put_vector(embedding.vector)
            self._choice_over(flight.state.generation)

    def _refused(self, message: AbortReq) -> None:
        flight = self._flights.get(message.rid)
        if flight is None:
            return
        if message.code == "engine_unavailable":  # meant for the frontend that was here before
            self._submit(flight, resumed=True)
            return
        if message.code == "queue_full" and self._take_back(flight):
            return
        self._abort(message.rid, flight.epoch, "refused")  # where it was sent twice
        self._fail(message.rid, _refusal(message))

    def _fail(self, rid: str, error: RequestError) -> None:
        flight = self._flights.pop(rid, None)
        if flight is not None:
            flight.state.generation.fail(error)

    def _disown(self, rid: str) -> None:
        """Output of a request that nobody here has: a frontend before this one had it."""
        if rid not in self._over:
            self._note_over(rid)
            self._abort(rid, self._port.epoch, "unknown")

    def _note_over(self, rid: str) -> None:
        if len(self._over) >= MAX_OVER:
            del self._over[next(iter(self._over))]
        self._over[rid] = None

    def _measure(self, state: ReqState, tokens: int, now: float) -> int:
        if not state.first_at:
            state.first_at = now
            self._meter.observe("llmd_time_to_first_token_seconds", now - state.sent_at)
        elif tokens:
            self._gaps.observe((now - state.last_at) / tokens)
        state.last_at = now
        if not state.generation.streamed:
            return 0
        state.generation.counted += tokens
        return tokens


def _rest(chunk: TextChunk, ids: int, chars: int) -> TextChunk:
    """`chunk` without its first `ids` tokens and `chars` characters, which have been delivered."""
    new = chunk.token_ids[ids:]
    logprobs: list[TokenLogprob] | None = chunk.logprobs[max(0, len(chunk.logprobs) - len(new)) :] if chunk.logprobs else None
    first, at = chunk.first + len(chunk.token_ids) - len(new), chunk.at + min(chars, len(chunk.text))
    prompt = chunk.prompt_logprobs if not ids else None
    return TextChunk(chunk.rid, first, chunk.text[chars:], new, chunk.finish, logprobs, prompt, chunk.cached_tokens, at)


def _refusal(message: AbortReq) -> RequestError:
    code = message.code or "aborted"
    try:
        return RequestError(message.message or "the request was aborted", code=code, param=message.param)
    except KeyError:
        return RequestError(message.message or "the engine refused the request", param=message.param)
