"""`TokenizerManager`: owner of every request until its client has the last byte.

It turns text into ids (long texts off the event loop), submits requests to the scheduler, hands the text that comes back to
the handlers, and ends requests that the engine's loss, a refusal or the client ends. Never blocks, never waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import Struct

from llmd.errors import RequestError
from llmd.frontend.channels import Incoming, SchedulerPort
from llmd.frontend.engine_view import EngineView, engine_unavailable, shutting_down
from llmd.frontend.limits import INLINE_TEXT
from llmd.frontend.replies import internal_error
from llmd.frontend.req_state import Generation, ReqState
from llmd.observability.totals import Meter
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.load import Tokenizer
from llmd.wire.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    DetokenizeParams,
    Detokenizer404,
    Embedding,
    Pooling,
    SamplingParams,
    TextChunk,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class ChoiceSpec(Struct, frozen=True):
    """One choice to generate."""

    input_ids: list[int]
    sampling: SamplingParams
    detokenize: DetokenizeParams = DetokenizeParams()
    logprobs: int = -1
    prompt_logprobs: bool = False
    priority: int = 0
    debug_text: str = ""


class TextSpec(Struct, frozen=True):
    """One text to embed."""

    input_ids: list[int]
    pooling: Pooling
    dimensions: int = 0
    """0: all."""
    priority: int = 0
    debug_text: str = ""


class TokenizerManager:
    """See the module. `port` is replaced at each epoch by itself (`SchedulerPort.open`). `random_seed`: that of the configuration."""

    def __init__(self, frontend: int, view: EngineView, port: SchedulerPort, meter: Meter, random_seed: int | None = None) -> None:
        self._seeds = secrets.SystemRandom() if random_seed is None else random.Random(f"{random_seed}/{frontend}")
        self._frontend = frontend
        self._view = view
        self._port = port
        self._meter = meter
        self._states: dict[str, ReqState] = {}
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self._meter.set("llmd_frontend_inflight", 0)

    # ------------------------------------------------------------ text to ids

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "requests come in only after the tokenizer is there"
        return self._tokenizer

    def equip(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Requests can be tokenized from now on."""
        self._tokenizer, self.template = tokenizer, template

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text; one that cannot fit into the context whatever its tokens are is refused before it costs anything."""
        self._check_length(text, param)
        if len(text) <= INLINE_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._off_loop(lambda: self.tokenizer.encode(text, add_special_tokens))

    async def encode_all(self, prompts: list[tuple[str, str | list[int]]]) -> list[list[int]]:
        """Token ids of each (name, prompt); one that is ids already stays as it is."""

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(p, True) if isinstance(p, str) else p for _, p in prompts]

        for name, prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(prompt, name)
        if sum(len(p) for _, p in prompts if isinstance(p, str)) <= INLINE_TEXT:
            return encode()
        return await self._off_loop(encode)

    def _check_length(self, text: str, param: str) -> None:
        context, least = self._view.context_length, self.tokenizer.least_tokens(text)
        if least > context:
            raise RequestError(
                f"this model's context is {context} tokens for prompt and output, the request has at least {least} prompt tokens; shorten the prompt",
                code="context_length_exceeded",
                param=param,
            )

    async def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """The chat template's text. Raises RequestError with the template's own sentence, or `no_chat_template`."""
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions or set model.chat_template", code="no_chat_template", param="messages")
        if sum(len(m["content"]) for m in messages) <= INLINE_TEXT:
            return template.render(messages, **kwargs)
        return await self._off_loop(lambda: template.render(messages, **kwargs))

    async def _off_loop(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    # ------------------------------------------------------------ requests

    def fresh_seed(self) -> int:
        """A seed for a request that gives none, so that it too can be continued elsewhere."""
        return self._seeds.getrandbits(63)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Encloses an HTTP request from admission to its last byte; a drain waits for it."""
        self._open += 1
        self._idle.clear()
        self._meter.set("llmd_frontend_inflight", self._open)
        try:
            yield
        finally:
            self._open -= 1
            self._meter.set("llmd_frontend_inflight", self._open)
            if self._open == 0:
                self._idle.set()

    @property
    def inflight(self) -> int:
        """HTTP requests that are not over."""
        return self._open

    def in_flight(self) -> list[ReqState]:
        """Every choice that is not over. Any thread may ask."""
        return list(self._states.values())

    async def idle(self, patience: float) -> bool:
        """Wait until no HTTP request is open."""
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def submit(self, rid: str, specs: list[ChoiceSpec], *, streamed: bool, metered: bool = True, client_id: str = "") -> Generation:
        """Send the choices to the engine. The caller must `release` the Generation in the end."""
        self._submittable()
        generation = Generation(rid, streamed=streamed, metered=metered, client_id=client_id)
        epoch = self._view.epoch
        for index, spec in enumerate(specs):
            request = TokenizedGenerateReqInput(
                rid=rid if len(specs) == 1 else f"{rid}-{index}",
                frontend=self._frontend,
                epoch=epoch,
                input_ids=spec.input_ids,
                sampling=spec.sampling,
                detokenize=spec.detokenize,
                logprobs=spec.logprobs,
                prompt_logprobs=spec.prompt_logprobs,
                priority=spec.priority,
                debug_text=spec.debug_text,
            )
            state = generation.add(request)
            self._states[request.rid] = state
            self._port.send(request)
        return generation

    def submit_texts(self, rid: str, texts: list[TextSpec], *, client_id: str = "") -> Generation:
        """The same for texts to embed: each choice ends with its `vector`."""
        self._submittable()
        generation = Generation(rid, streamed=False, client_id=client_id)
        for index, text in enumerate(texts):
            request = TokenizedEmbeddingReqInput(
                rid=rid if len(texts) == 1 else f"{rid}-{index}",
                frontend=self._frontend,
                epoch=self._view.epoch,
                input_ids=text.input_ids,
                pooling=text.pooling,
                dimensions=text.dimensions,
                priority=text.priority,
                debug_text=text.debug_text,
            )
            self._states[request.rid] = generation.add(request)
            self._port.send(request)
        return generation

    def _submittable(self) -> None:
        if self._view.shutting_down:
            raise shutting_down()
        if not self._view.engine_up:
            raise engine_unavailable()

    def name(self, generation: Generation, names: tuple[str, ...]) -> None:
        """Give a Generation the names that its client has for its choices. Raises RequestError where one is taken by what runs, or twice."""
        taken = {name for state in self._states.values() for name in state.generation.names}
        if len(set(names)) < len(names) or not taken.isdisjoint(names):
            raise RequestError("rid: there is a request of that name already", code="duplicate_request_id", param="rid")
        generation.names = names

    def release(self, generation: Generation, why: str) -> None:
        """Forget a Generation; what still runs of it is aborted in the scheduler."""
        for state in generation.choices:
            rid = state.request.rid
            if self._states.pop(rid, None) is not None:
                self._port.send(AbortReq(rid=rid, epoch=state.request.epoch, code=why))

    def abort(self, *, rid: str = "", client_id: str = "", everything: bool = False, code: str = "aborted") -> list[str]:
        """End the requests of that exact rid or client id, or all, with `aborted` or `reloaded`; returns their rids. The warm-up and probes go on."""
        why = "other weights are being loaded" if code == "reloaded" else "the request was aborted by an administrator"
        open_ones = {id(s.generation): s.generation for s in self._states.values()}.values()

        def meant(g: Generation) -> bool:
            return everything or (rid != "" and (g.rid == rid or rid in g.names)) or (client_id != "" and g.client_id == client_id)

        chosen = [g for g in open_ones if g.metered and meant(g)]
        for generation in chosen:
            self.release(generation, code)
            generation.fail(RequestError(why, code=code))
        return [generation.rid for generation in chosen]

    def fail_all(self, error: RequestError) -> None:
        """End every request in flight with `error`; an engine that still lives need not compute them to their end."""
        for generation in {id(s.generation): s.generation for s in self._states.values()}.values():
            self.release(generation, error.code or "error")
            generation.fail(error)

    def undeliverable(self, rid: str) -> None:
        """The scheduler never took this request."""
        state = self._states.pop(rid, None)
        if state is not None:
            state.generation.fail(engine_unavailable())

    def engine_changed(self, before: tuple[int, int], after: tuple[int, int], *, up: bool) -> None:
        """A new picture of the engine: connect to a new epoch; end what depended on a process that is gone."""
        if before != after or not up:
            if self._states:
                log.warning("%d requests end with engine_unavailable", len(self._states))
            self.fail_all(engine_unavailable())
        if before[0] != after[0]:
            self._port.open(after[0])

    # ------------------------------------------------------------ outputs

    def receive(self, message: Incoming) -> None:
        """One message of the tokenizer channel."""
        if message.epoch != self._view.epoch:
            self._meter.inc("llmd_wire_stale_messages_total", channel="tokenizer")
            return
        match message:
            case BatchStrOutput():
                now = time.monotonic()
                for chunk in message.chunks:
                    self._deliver(chunk, now)
            case BatchEmbeddingOutput():
                for embedding in message.embeddings:
                    self._embedded(embedding)
            case AbortReq():
                state = self._states.pop(message.rid, None)
                if state is not None:
                    state.generation.fail(_refusal(message))
            case Detokenizer404():
                state = self._states.pop(message.rid, None)
                if state is not None:
                    self._port.send(AbortReq(rid=message.rid, epoch=message.epoch, code="engine_unavailable"))
                    state.generation.fail(engine_unavailable())

    def _deliver(self, chunk: TextChunk, now: float) -> None:
        state = self._states.get(chunk.rid)
        if state is None:
            return
        expected = len(state.output_ids)
        if chunk.first != expected:
            if chunk.first + len(chunk.token_ids) <= expected and chunk.finish is None:
                return
            log.error("output of a request starts at token %d, expected %d", chunk.first, expected, extra={"rid": chunk.rid})
            self.release(state.generation, "internal_error")
            state.generation.fail(internal_error())
            return
        if state.generation.metered:
            self._measure(state, len(chunk.token_ids), now)
        state.put(chunk)
        finish = chunk.finish
        if finish is None:
            return
        del self._states[chunk.rid]
        if isinstance(finish.matched, str):
            self._port.send(AbortReq(rid=chunk.rid, epoch=state.request.epoch, code="stop_string"))
        if finish.reason == "abort":
            state.generation.fail(RequestError("the request was aborted", code="aborted"))

    def _embedded(self, embedding: Embedding) -> None:
        state = self._states.pop(embedding.rid, None)
        if state is not None:
            state.put_vector(embedding.vector)

    def _measure(self, state: ReqState, tokens: int, now: float) -> None:
        if not state.first_at:
            state.first_at = now
            self._meter.observe("llmd_time_to_first_token_seconds", now - state.sent_at)
        elif tokens:
            self._meter.observe("llmd_inter_token_latency_seconds", (now - state.last_at) / tokens)
        state.last_at = now


def _refusal(message: AbortReq) -> RequestError:
    code = message.code or "aborted"
    try:
        return RequestError(message.message or "the request was aborted", code=code, param=message.param)
    except KeyError:
        return RequestError(message.message or "the engine refused the request", param=message.param)
