"""Overlap: a step is prepared and launched before the last one's tokens are known, and nobody gets another token for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llmd.model.batch import ForwardBatch, Runner, SampleRequest, SampleResult
from llmd.scheduler.kv import KvManager
from tests.daemon import SLOW
from tests.unit.scheduler.harness import EOS, Bench, CheckingRunner, oracle


class Gated(CheckingRunner):
    """Each step waits until it may go on; says EOS at given positions."""

    def __init__(self, kv: KvManager) -> None:
        super().__init__(kv)
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.open = False
        self.ends: set[int] = set()
        self.seen: list[list[int]] = []

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        self.seen.append(batch.input_ids.tolist())
        self.started.release()
        if not self.open:
            assert self.go.acquire(timeout=10 * SLOW)
        results = super().step(batch, wanted)
        return [SampleResult(EOS) if request.position in self.ends else result for request, result in zip(wanted, results, strict=True)]


@pytest.fixture
def made() -> list[Gated]:
    """The runners that benches of `bench` have."""
    return []


@pytest.fixture
def bench(made: list[Gated]) -> Iterator[Bench]:
    def runner(kv: KvManager) -> Runner:
        made.append(Gated(kv))
        return made[-1]

    bench = Bench(runner=runner, overlap=True)
    yield bench
    made[0].open = True
    made[0].go.release(100)
    bench.close()


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(bench: Bench, made: list[Gated]) -> None:
    runner = made[0]
    bench.send("a", [1, 2, 3], 6)
    assert bench.turn()
    assert runner.started.acquire(timeout=10 * SLOW)
    turning = threading.Thread(target=bench.turn)
    turning.start()  # launches the second step, then waits for the first
    assert not runner.started.acquire(timeout=0.05)
    assert bench.scheduler.decode.running["a"].output_ids == []
    runner.go.release()
    assert runner.started.acquire(timeout=10 * SLOW), "the second step runs at once"
    turning.join(10)
    assert bench.out.tokens["a"] == oracle([1, 2, 3], 1), "the first one's token is out while the second computes"
    assert runner.seen == [[1, 2, 3], oracle([1, 2, 3], 1)]
    runner.open = True
    runner.go.release(100)
    bench.run()
    assert bench.out.tokens["a"] == oracle([1, 2, 3], 6)
    assert len(runner.seen) == 6, "no step goes on from the last token"


def test_what_is_computed_beyond_the_end_is_dropped(bench: Bench, made: list[Gated]) -> None:
    runner = made[0]
    runner.open, runner.ends = True, {3}
    bench.send("a", [1, 2, 3], 20)
    bench.send("b", [4], 20, ignore_eos=True)
    bench.run()
    assert bench.out.tokens["a"] == [*oracle([1, 2, 3], 3), EOS]
    assert len(bench.out.tokens["b"]) == 20
    assert bench.kv.counts.active == 0


@pytest.mark.parametrize("ends", ["abort", "fail"])
def test_a_request_that_goes_while_its_step_runs_harms_no_other(bench: Bench, made: list[Gated], ends: str) -> None:
    runner = made[0]
    runner.open = True
    bench.send("a", [1, 2, 3], 30)
    for _ in range(5):
        bench.turn()
    if ends == "abort":
        bench.abort("a")
    else:
        runner.fail_next = True
    for number in range(4):
        bench.send(f"r{number}", [number, 7], 12)
        bench.turn()
    bench.run()
    assert bench.out.tokens["a"] == oracle([1, 2, 3], 30)[: len(bench.out.tokens["a"])]
    good = [f"r{number}" for number in range(4) if f"r{number}" not in bench.out.errors]
    # A step that fails costs its requests, and those of the step that was launched behind it.
    assert len(good) >= (4 if ends == "abort" else 2)
    assert all(bench.out.tokens[rid] == oracle([int(rid[1:]), 7], 12) for rid in good)


def mixed(overlap: bool) -> dict[str, Any]:
    bench = Bench(pages=30, max_running=5, chunk=5, overlap=overlap)
    for number in range(12):
        bench.send(f"r{number}", [number % 3] * (3 + 5 * (number % 4)), 10 + number, prompt_logprobs=number == 4, min_new_tokens=number % 3)
    bench.send("none", [5, 6, 7], 0, prompt_logprobs=True)
    bench.run()
    bench.close()
    assert not bench.out.errors
    return {rid: (bench.out.tokens[rid], chunk.finish, bench.out.first[rid].prompt_logprobs) for rid, chunk in bench.out.last.items()}


def test_on_and_off_give_the_same() -> None:
    assert mixed(True) == mixed(False)
