"""`TokenizerManager`: owner of every request until its client has the last byte.

It turns text into ids (long texts off the event loop), and hands requests to `Flights`, which sees them through whatever happens to the
engine. Never blocks, never waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import Struct

from llmd.errors import RequestError
from llmd.frontend.channels import SchedulerPort
from llmd.frontend.engine_view import EngineView, shutting_down
from llmd.frontend.flights import Flights
from llmd.frontend.limits import INLINE_TEXT
from llmd.frontend.names import Names
from llmd.frontend.req_state import Generation, ReqState, Submitted
from llmd.observability.totals import Meter
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.load import Tokenizer
from llmd.wire.messages import DetokenizeParams, Pooling, SamplingParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

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
    """See the module. `port` is replaced at each epoch by itself (`SchedulerPort.open`). `random_seed`: that of the configuration.
    `incarnation`: this frontend's."""

    def __init__(self, frontend: int, view: EngineView, port: SchedulerPort, meter: Meter, random_seed: int | None = None, incarnation: int = 1) -> None:
        self._seeds = secrets.SystemRandom() if random_seed is None else random.Random(f"{random_seed}/{frontend}")
        self._frontend, self._incarnation = frontend, incarnation
        self._view = view
        self._meter = meter
        self.flights = Flights(view, port, meter)
        self.names = Names()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self.aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-any")
        """For texts of any length, which no request for the engine should wait for."""
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

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt", bounded: bool = True) -> list[int]:
        """Token ids of a text; `bounded`: one that cannot fit into the context whatever its tokens are is refused before it costs anything."""
        if bounded:
            self._check_length(text, param)
        if len(text) <= INLINE_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._off_loop(lambda: self.tokenizer.encode(text, add_special_tokens), self.executor if bounded else self.aside)

    async def encode_all(self, prompts: list[tuple[str, str | list[int]]], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each (name, prompt); one that is ids already stays as it is. The first that is too long is refused, before those behind it."""

        def encode() -> list[list[int]]:
            found = []
            for name, prompt in prompts:
                found.append(self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt)
                self.check_fits(len(found[-1]), name)
            return found

        for name, prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(prompt, name)
            else:
                self.check_fits(len(prompt), name)
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

    async def decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each row of ids."""

        def decode() -> list[str]:
            return [self.tokenizer.decode(row, skip_special_tokens) for row in rows]

        return decode() if sum(map(len, rows)) <= INLINE_TEXT else await self._off_loop(decode, self.aside)

    async def token_texts(self, rows: list[list[int]]) -> list[list[str]]:
        """The text of each id on its own, row by row."""

        def texts() -> list[list[str]]:
            return [[self.tokenizer.token_text(id) for id in row] for row in rows]

        return texts() if sum(map(len, rows)) <= INLINE_TEXT else await self._off_loop(texts, self.aside)

    def check_fits(self, tokens: int, param: str) -> None:
        """Raises RequestError where a text that generates nothing is too long."""
        context, kv = self._view.context_length, self._view.kv_capacity
        if tokens > context:
            message = f"this model's context is {context} tokens, the text has {tokens}; shorten it"
            raise RequestError(message, code="context_length_exceeded", param=param)
        if kv is not None and tokens > kv:
            raise RequestError(f"the KV cache holds {kv} tokens, the text has {tokens}", code="exceeds_kv_capacity", param=param)

    async def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """The chat template's text. Raises RequestError with the template's own sentence, or `no_chat_template`."""
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions or set model.chat_template", code="no_chat_template", param="messages")
        if sum(len(m["content"]) for m in messages) <= INLINE_TEXT:
            return template.render(messages, **kwargs)
        return await self._off_loop(lambda: template.render(messages, **kwargs))

    async def _off_loop(self, call: Callable[[], T], executor: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor or self.executor, call)

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
        return self.flights.states

    async def idle(self, patience: float) -> bool:
        """Wait until no HTTP request is open."""
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def submit(self, rid: str, specs: Sequence[ChoiceSpec | TextSpec], *, streamed: bool, metered: bool = True, client_id: str = "") -> Generation:
        """Send the choices to the engine, or to the next one. The caller must `release` the Generation in the end."""
        self._submittable()
        generation = Generation(rid, streamed=streamed, metered=metered, client_id=client_id)
        for index, spec in enumerate(specs):
            generation.add(self._message(rid if len(specs) == 1 else f"{rid}-{index}", spec))
        self.flights.begin(generation)
        return generation

    def _message(self, rid: str, spec: ChoiceSpec | TextSpec) -> Submitted:
        """As it is sent, but for the epoch."""
        if isinstance(spec, TextSpec):
            return TokenizedEmbeddingReqInput(
                rid=rid,
                frontend=self._frontend,
                incarnation=self._incarnation,
                epoch=0,
                input_ids=spec.input_ids,
                pooling=spec.pooling,
                dimensions=spec.dimensions,
                priority=spec.priority,
                debug_text=spec.debug_text,
            )
        return TokenizedGenerateReqInput(
            rid=rid,
            frontend=self._frontend,
            incarnation=self._incarnation,
            epoch=0,
            input_ids=spec.input_ids,
            sampling=spec.sampling,
            detokenize=spec.detokenize,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            priority=spec.priority,
            debug_text=spec.debug_text,
        )

    def _submittable(self) -> None:
        if self._view.shutting_down:
            raise shutting_down()

    def release(self, generation: Generation, why: str) -> None:
        """Forget a Generation; what still runs of it is aborted in the scheduler."""
        self.flights.release(generation, why)

    def abort(self, *, rid: str = "", client_id: str = "", everything: bool = False, code: str = "aborted") -> list[str]:
        """End the requests of that exact rid or client id, or all, with `aborted` or `reloaded`; returns their rids. The warm-up and probes go on."""
        why = "other weights are being loaded" if code == "reloaded" else "the request was aborted by an administrator"

        def meant(g: Generation) -> bool:
            return everything or (rid != "" and (g.rid == rid or rid in g.names)) or (client_id != "" and g.client_id == client_id)

        chosen = [g for g in self.flights.generations if g.metered and meant(g)]
        for generation in chosen:
            self.release(generation, code)
            generation.fail(RequestError(why, code=code))
        return [generation.rid for generation in chosen]
