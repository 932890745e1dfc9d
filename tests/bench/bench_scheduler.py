"""What the scheduler itself costs a request and a token: `python -m tests.bench.bench_scheduler [--quick] [--profile RUNNING QUEUED TREE POLICY]`.

Its own loop with the dummy runner in one process; messages come from a list, what it sends is encoded and dropped. CPU time of the one
thread, without what the runner takes. A token is one of a step in which all running requests decode; a request is all but its
tokens: taking it in, admitting it, its prompt, its end. The factor is that of a token's cost with a queue and a large tree.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import sys
import time
from typing import Any, cast

import numpy as np

from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.scheduler.dummy import DummyRunner
from llmd.scheduler.kv import KvManager
from llmd.scheduler.policy import Policy
from llmd.wire.codec import encode
from llmd.wire.messages import AbortReq, BatchTokenIDOutput, TokenChunk
from tests.unit.scheduler.harness import Bench

PAGE, PROMPT, VOCAB = 16, 32, 50_000
#: Tokens of a sequence that lies in the tree.
KNOWN = 128
#: Tokens that are measured in one go, at least, and the goes of which the median counts.
TOKENS, GOES = 4096, 5


class Timed(DummyRunner):
    """Keeps its own time out of the books."""

    def __init__(self, kv: KvManager) -> None:
        super().__init__(kv.pages.num_slots, VOCAB)
        self.seconds = 0.0

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        began = time.thread_time()
        results = super().step(batch, wanted)
        self.seconds += time.thread_time() - began
        return results


class Encoding:
    """What the real output does up to its socket."""

    blocked = False
    channels: tuple[()] = ()

    def chunks(self, chunks: list[TokenChunk]) -> None:
        encode(BatchTokenIDOutput(epoch=1, chunks=chunks))

    def forget(self, rid: str) -> None:
        encode(AbortReq(rid=rid, epoch=1))

    def refuse(self, *refusal: Any) -> None:
        raise AssertionError(refusal)

    def flush(self) -> None: ...


class Setting:
    """A scheduler with so many running and queued requests, and so many tokens in its tree."""

    def __init__(self, running: int, queued: int, tree: int, policy: Policy) -> None:
        steps = max(1, TOKENS // running) * (GOES + 2) + 64
        context = PROMPT + 2 * steps
        pages = running * (context // PAGE + 2) + tree // PAGE
        self.bench = Bench(
            pages=pages,
            max_running=running,
            context=context,
            chunk=1 << 20,
            max_queued=max(queued, 4096),
            page_size=PAGE,
            policy=policy,
            runner=Timed,
            vocab=VOCAB,
        )
        self.scheduler = self.bench.scheduler
        self.runner = cast(Timed, self.scheduler._compute._runner)
        self.bench.out = self.scheduler._output = Encoding()  # type: ignore[assignment]
        self.running, self.queued, self.new = running, queued, itertools.count()
        self.random = np.random.default_rng(1)
        self._plant(tree)

    def _plant(self, tokens: int) -> None:
        kv = self.bench.kv
        assert kv.cache is not None
        for key in self.random.integers(0, VOCAB, (tokens // KNOWN, KNOWN), dtype=np.int32):
            pages = kv.pages.alloc(KNOWN // PAGE)
            assert pages is not None
            kv.cache.insert(("", ""), key.tobytes(), pages)

    def send(self, count: int, tokens: int) -> list[str]:
        rids = [f"r{next(self.new)}" for _ in range(count)]
        for rid, prompt in zip(rids, self.random.integers(0, VOCAB, (count, PROMPT)).tolist(), strict=True):
            self.bench.send(rid, prompt, tokens, ignore_eos=True, temperature=0.0)
        return rids

    def turn(self) -> None:
        """A round of the loop, without the harness's checks."""
        scheduler = self.scheduler
        scheduler.receive(lambda command: None)
        batch = scheduler.schedule()
        if batch.reqs or scheduler.launched:
            scheduler.step(batch)

    def timed(self, turns: int) -> float:
        """CPU seconds of the scheduler alone."""
        began, runner = time.thread_time(), self.runner.seconds
        for _ in range(turns):
            self.turn()
        return time.thread_time() - began - (self.runner.seconds - runner)

    def per_token(self) -> float:
        """Microseconds, all of them decoding."""
        self.send(self.running, 1 << 20)
        self.timed(2)
        self.send(self.queued, 1 << 20)
        self.timed(2)
        assert len(self.scheduler.decode.running) == self.running and len(self.scheduler.waiting) == self.queued
        turns = max(1, TOKENS // self.running)
        return statistics.median(self.timed(turns) for _ in range(GOES)) / turns / self.running * 1e6

    def per_request(self) -> float:
        """Microseconds, beside its one token. All come at once; nothing else runs."""
        for rid in (*self.scheduler.decode.running, *(req.rid for req in self.scheduler.waiting)):
            self.scheduler.abort(rid)
        count = max(64, self.running)
        self.send(count, 1)
        spent, turns = 0.0, 0
        while self.bench.source.queue or self.scheduler.in_flight:
            spent, turns = spent + self.timed(1), turns + 1
        return spent / count * 1e6


def profile(running: int, queued: int, tree: int, policy: Policy) -> None:
    """Where the time of decode steps goes."""
    setting = Setting(running, queued, tree, policy)
    setting.per_token()
    profiler = cProfile.Profile()
    profiler.runcall(setting.timed, max(1, TOKENS // running))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    if "--profile" in sys.argv:
        given = sys.argv[sys.argv.index("--profile") + 1 :]
        profile(int(given[0]), int(given[1]), int(given[2]), cast(Any, given[3]))
        return
    sizes = (1, 64, 512) if "--quick" in sys.argv else (1, 64, 512, 4096)
    print(f"{'policy':6} {'running':>7} {'queued':>7} {'tree':>9} {'us/token':>9} {'factor':>7} {'us/request':>11}")
    for policy, running in itertools.product(cast(tuple[Policy, ...], ("fcfs", "lpm")), sizes):
        least = 0.0
        for queued, tree in itertools.product((1, 10_000), (1_000, 1_000_000)):
            setting = Setting(running, queued, tree, policy)
            token = setting.per_token()
            least = least or token
            print(f"{policy:6} {running:7} {queued:7} {tree:9} {token:9.2f} {token / least:7.2f} {setting.per_request():11.1f}", flush=True)


if __name__ == "__main__":
    main()
