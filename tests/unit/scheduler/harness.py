"""A scheduler without processes or sockets: messages come from a list, outputs land in dictionaries, the runner checks its KV."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llmd.memory.pools import ReqToTokenPool, TokenToKVPoolAllocator
from llmd.memory.radix_cache import Eviction, RadixCache
from llmd.model.batch import EmbedRequest, ForwardBatch, Runner, SampleRequest, SampleResult
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.scheduler.arrivals import Limits
from llmd.scheduler.journal import Journal
from llmd.scheduler.kv import KvManager
from llmd.scheduler.loop import Scheduler
from llmd.scheduler.policy import Policy, make_queue
from llmd.scheduler.suspects import Suspects
from llmd.wire.messages import (
    AbortReq,
    Command,
    Embedding,
    Pooling,
    Resend,
    SamplingParams,
    SchedulerInput,
    TokenChunk,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenLogprob,
)

PAGE = 4
VOCAB = 97
EOS = 96


def next_token(sequence: list[int], position: int) -> int:
    """The model: depends on every token before, never EOS unless the test asks for it."""
    digest = hashlib.blake2b(np.array([position, *sequence], dtype=np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (VOCAB - 1)


def oracle(prompt: list[int], count: int) -> list[int]:
    """What the model says to `prompt` when nothing disturbs it."""
    out: list[int] = []
    for position in range(count):
        out.append(next_token(prompt + out, position))
    return out


class CheckingRunner:
    """Keeps (token, position) in each KV slot, and reads a request's whole sequence back through its row before it answers."""

    def __init__(self, kv: KvManager) -> None:
        self._page = kv.pages.page_size
        self._kv = np.full((kv.pages.num_slots, 2), -1, dtype=np.int64)
        self.spoil: set[int] = set()
        """Output positions whose logits are not finite."""
        self.fail_next = False
        self.step_sizes: list[int] = []

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        if self.fail_next:
            self.fail_next = False
            raise ArithmeticError("a fault in the model")
        self.step_sizes.append(len(batch.input_ids))
        assert batch.extend_lens.sum() == len(batch.input_ids) == len(batch.positions) == len(batch.out_cache_loc)
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc), "two tokens share a slot"
        assert (batch.out_cache_loc >= self._page).all(), "page 0 is nobody's"
        self._kv[batch.out_cache_loc, 0] = batch.input_ids
        self._kv[batch.out_cache_loc, 1] = batch.positions
        for embed in batch.embeds:
            self._pool(batch, embed)
        return [self._sample(batch, request) for request in wanted]

    def _pool(self, batch: ForwardBatch, embed: EmbedRequest) -> None:
        """A token's state is (token, position, 1)."""
        row, length, new = batch.req_pool_indices[embed.row], batch.seq_lens[embed.row], batch.extend_lens[embed.row]
        stored = self._kv[batch.req_to_token[row, :length]]
        assert stored[:, 1].tolist() == list(range(length)), "a slot holds another token's KV"
        states = np.column_stack([stored[length - new :], np.ones(new)])
        chosen = {"last": states[-1], "cls": states[0], "mean": states.sum(0)}[embed.pooling]
        embed.vector = (chosen * (np.nan if self.spoil else 1)).astype(np.float32)

    def _sample(self, batch: ForwardBatch, request: SampleRequest) -> SampleResult:
        row, length = batch.req_pool_indices[request.row], batch.seq_lens[request.row]
        stored = self._kv[batch.req_to_token[row, :length]]
        assert stored[:, 1].tolist() == list(range(length)), "a slot holds another token's KV"
        result = SampleResult(next_token(stored[:, 0].tolist(), request.position), finite=request.position not in self.spoil)
        if request.prompt_logprob_ids:
            assert batch.extend_lens[request.row] == length
            result.prompt_logprobs = [(-float(token), ()) for token in request.prompt_logprob_ids]
        return result


class FakeInput:
    """Stands in for llmd.scheduler.input.Input."""

    def __init__(self) -> None:
        self.queue: deque[SchedulerInput] = deque()

    def messages(self) -> Iterator[SchedulerInput]:
        while self.queue:
            yield self.queue.popleft()

    def commands(self) -> Iterator[Command]:
        return iter(())

    def wait(self, until: float | None, writable: Iterable[Any]) -> None: ...


class FakeOutput:
    """Stands in for llmd.scheduler.output.Output, and checks that no token is lost or doubled."""

    def __init__(self) -> None:
        self.blocked = False
        self.channels: list[Any] = []
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprob]] = defaultdict(list)
        self.last: dict[str, TokenChunk] = {}
        self.first: dict[str, TokenChunk] = {}
        self.errors: dict[str, str | None] = {}
        self.forgotten: list[str] = []
        self.vectors: dict[str, list[float]] = {}
        self.lost: set[str] = set()
        """The detokenizer has lost these: what comes next of them is all of their output."""
        self.again: list[TokenChunk] = []

    def chunks(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.rid in self.lost and chunk.start is not None:
                assert (chunk.first, chunk.token_ids) == (0, self.tokens[chunk.rid])
                self.again.append(chunk)
                continue
            assert (chunk.start is not None) == (chunk.rid not in self.first)
            self.first.setdefault(chunk.rid, chunk)
            if chunk.start is not None:
                self.tokens[chunk.rid] = [-1] * chunk.first
            assert chunk.first == len(self.tokens[chunk.rid])
            assert chunk.rid not in self.last or self.last[chunk.rid].finish is None
            self.tokens[chunk.rid] += chunk.token_ids
            self.logprobs[chunk.rid] += chunk.logprobs or []
            self.last[chunk.rid] = chunk

    def embeddings(self, found: list[tuple[int, Embedding]]) -> None:
        for _, embedding in found:
            assert embedding.rid not in self.vectors and embedding.rid not in self.errors
            self.vectors[embedding.rid] = np.frombuffer(embedding.vector, dtype="<f4").tolist()

    def forget(self, rid: str) -> None:
        self.forgotten.append(rid)

    def refuse(self, rid: str, frontend: int, code: str | None, message: str, param: str | None = None) -> None:
        assert rid not in self.errors
        self.errors[rid] = code

    def flush(self) -> None: ...


class Bench:
    """A scheduler on the bench: `turn` is one round of its loop. With `overlap` it is to be closed."""

    def __init__(
        self,
        *,
        pages: int = 64,
        max_running: int = 8,
        context: int = 128,
        chunk: int | None = 16,
        max_queued: int = 1000,
        radix: bool = True,
        page_size: int = PAGE,
        policy: Policy = "fcfs",
        max_wait: float = 60.0,
        eviction: Eviction = "lru",
        runner: Callable[[KvManager], Runner] | None = None,
        vocab: int = VOCAB,
        overlap: bool = False,
        suspects: Suspects | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`runner`: what computes, in place of a CheckingRunner."""
        cache = RadixCache(page_size, eviction) if radix else None
        self.kv = KvManager(ReqToTokenPool(max_running, context), TokenToKVPoolAllocator(pages, page_size), cache)
        self.policy = policy
        self.runner = CheckingRunner(self.kv)
        self.disordered = False
        self.source = FakeInput()
        self.out = FakeOutput()
        self.meter = Meter()
        limits = Limits(
            context_length=context,
            vocab_size=vocab,
            max_running=max_running,
            max_queued=max_queued,
            queue_timeout=60.0,
            request_timeout=None,
            eos_token_ids=(EOS,),
        )
        source: Any = self.source
        output: Any = self.out
        waiting = make_queue(policy, max_wait, lambda req: self.kv.known_pages(req)[0])
        self.scheduler = Scheduler(
            runner(self.kv) if runner else self.runner,
            self.kv,
            source,
            output,
            limits=limits,
            chunk=chunk,
            meter=self.meter,
            pulse=Pulse(),
            waiting=waiting,
            overlap=overlap,
            suspects=suspects,
            journal=journal,
        )

    def send(
        self,
        rid: str,
        prompt: list[int],
        count: int,
        *,
        output_ids: list[int] | None = None,
        prompt_logprobs: bool = False,
        logprobs: int = -1,
        priority: int = 0,
        resumed: bool = False,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(max_new_tokens=count, **sampling)
        self.source.queue.append(
            TokenizedGenerateReqInput(
                rid=rid,
                frontend=0,
                epoch=1,
                input_ids=prompt,
                sampling=params,
                output_ids=output_ids or [],
                prompt_logprobs=prompt_logprobs,
                logprobs=logprobs,
                priority=priority,
                resumed=resumed,
            )
        )

    def embed(self, rid: str, text: list[int], pooling: Pooling = "mean", *, dimensions: int = 0, priority: int = 0) -> None:
        self.source.queue.append(
            TokenizedEmbeddingReqInput(rid=rid, frontend=0, epoch=1, input_ids=text, pooling=pooling, dimensions=dimensions, priority=priority)
        )

    def resend(self, rid: str, prompt: list[int], count: int, known: list[int], *, logprobs: int = -1) -> None:
        """The detokenizer is another one; the frontend has got `known` tokens."""
        self.out.lost.add(rid)
        params = SamplingParams(max_new_tokens=count)
        request = TokenizedGenerateReqInput(rid=rid, frontend=0, epoch=1, input_ids=prompt, sampling=params, output_ids=known, logprobs=logprobs, resumed=True)
        self.source.queue.append(Resend(epoch=1, request=request))

    def abort(self, rid: str) -> None:
        self.source.queue.append(AbortReq(rid=rid, epoch=1))

    def turn(self) -> bool:
        """Receive, schedule, step or rest; checks the books. False when nothing ran."""
        self.scheduler.receive(lambda command: None)
        batch = self.scheduler.schedule()
        self.check()
        busy = bool(batch.reqs or self.scheduler.launched)
        if busy:
            self.scheduler.step(batch)
        else:
            self.scheduler.rest()
        self.check()
        return busy

    def run(self, turns: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(turns):
            if not self.turn() and not self.scheduler.in_flight and not self.source.queue:
                return
        raise AssertionError("work never ends")

    def close(self) -> None:
        """Only a bench with overlap has something to close."""
        self.scheduler.close()

    def check(self) -> None:
        """free + cached + active = total, what is active is what running requests hold, and by fcfs nobody runs or waits before an older one, unless
        some have had to run alone."""
        running = self.scheduler.decode.running.values()
        order = [req.order for req in (*running, *self.scheduler.waiting)]
        self.disordered |= self.scheduler.suspects.any
        assert self.policy != "fcfs" or order == sorted(order) or self.disordered
        assert self.kv.check(running) is None
        counts = self.kv.counts
        assert counts.free + counts.cached + counts.active == self.kv.pages.pages_total and min(counts.free, counts.cached, counts.active) >= 0
        assert all(req.row and req.pages for req in running)
        assert all(not req.row and not req.pages and req.computed == 0 for req in self.scheduler.waiting)
        for chunk in self.out.first.values():
            assert chunk.cached_tokens >= 0 and chunk.cached_tokens % self.kv.pages.page_size == 0

    def counter(self, name: str) -> float:
        return self.meter.snapshot().counters.get(name, 0.0)
