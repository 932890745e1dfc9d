"""Texts to embed, beside requests that generate: each gets its own vector, whatever happens around it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmd.wire.messages import Pooling
from tests.unit.scheduler.harness import Bench, oracle


def expected(text: list[int], pooling: Pooling, dimensions: int = 3) -> list[float]:
    """The harness's model: a token's state is (token, position, 1)."""
    states = np.array([(token, position, 1) for position, token in enumerate(text)], dtype=np.float64)
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling][:dimensions]
    return list(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 100])
def test_a_text_in_chunks_gets_the_vector_of_the_whole(pooling: Pooling, length: int) -> None:
    bench = Bench(chunk=16)
    text = random.Random(length).choices(range(90), k=length)
    bench.embed("a", text, pooling)
    bench.run()
    assert bench.out.vectors["a"] == pytest.approx(expected(text, pooling), abs=1e-6)
    assert not bench.out.tokens and not bench.out.errors


def test_dimensions_cut_the_vector_and_its_length_is_one_again() -> None:
    bench = Bench()
    bench.embed("a", [3, 4, 5], "mean", dimensions=2)
    bench.embed("b", [3, 4, 5], "mean", dimensions=999)
    bench.run()
    assert bench.out.vectors["a"] == pytest.approx(expected([3, 4, 5], "mean", 2))
    assert np.linalg.norm(bench.out.vectors["a"]) == pytest.approx(1)
    assert bench.out.vectors["b"] == pytest.approx(expected([3, 4, 5], "mean"))


def test_a_text_shares_steps_with_those_who_generate() -> None:
    bench = Bench(chunk=16)
    bench.send("g", [7, 8, 9], 20)
    bench.turn()
    bench.embed("e", list(range(50)), "mean")
    bench.run()
    assert bench.out.tokens["g"] == oracle([7, 8, 9], 20)
    assert bench.out.vectors["e"] == pytest.approx(expected(list(range(50)), "mean"))
    assert max(bench.runner.step_sizes[1:]) == 17, "chunks of sixteen beside one token of the stream"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_that_does_not_fit_gets_what_each_would_get_alone(seed: int, overlap: bool) -> None:
    dice = random.Random(seed)
    bench = Bench(pages=24, max_running=6, context=64, chunk=8, policy="priority" if seed % 2 else "fcfs", max_wait=3600.0, overlap=overlap)
    trunk = dice.choices(range(90), k=24)
    texts: dict[str, tuple[list[int], Pooling]] = {}
    prompts: dict[str, list[int]] = {}
    for number in range(40):
        text = trunk[: dice.choice([0, 8, 24])] + dice.choices(range(90), k=dice.randrange(1, 30))
        if dice.random() < 0.6:
            pooling: Pooling = dice.choice(["last", "mean", "cls"])
            texts[f"e{number}"] = text, pooling
            bench.embed(f"e{number}", text, pooling, priority=40 - number)
        else:
            prompts[f"g{number}"] = text
            bench.send(f"g{number}", text, 8, priority=40 - number)
        for _ in range(dice.randrange(3)):
            bench.turn()
    bench.run()
    bench.close()
    for rid, (text, pooling) in texts.items():
        assert bench.out.vectors[rid] == pytest.approx(expected(text, pooling), abs=1e-6)
    for rid, prompt in prompts.items():
        assert bench.out.tokens[rid] == oracle(prompt, 8)
    assert seed % 2 == 0 or bench.counter("llmd_requests_preempted_total") > 0


def test_known_beginnings_are_reused_for_the_last_token_and_not_for_the_mean() -> None:
    bench = Bench(chunk=64)
    bench.embed("a", list(range(40)), "mean")
    bench.run()
    bench.embed("b", list(range(40)), "last")
    bench.embed("c", list(range(40)), "mean")
    bench.run()
    assert sum(bench.runner.step_sizes) == 40 + 4 + 40
    assert bench.out.vectors["b"] == pytest.approx(expected(list(range(40)), "last"))
    assert bench.out.vectors["c"] == bench.out.vectors["a"]


def test_an_aborted_text_gives_its_memory_back_and_no_vector() -> None:
    bench = Bench(chunk=8)
    bench.embed("a", list(range(60)), "mean")
    bench.embed("b", [1, 2], "last")
    bench.turn()
    bench.abort("a")
    bench.run()
    assert list(bench.out.vectors) == ["b"]
    assert not bench.out.errors and bench.kv.counts.active == 0


def test_limits_hold_for_texts_too() -> None:
    bench = Bench(context=16, max_running=1, max_queued=1)
    bench.embed("long", list(range(17)), "mean")
    bench.embed("empty", [], "mean")
    bench.embed("unknown", [9999], "mean")
    bench.embed("whole", list(range(16)), "mean")
    bench.embed("waits", [1], "mean")
    bench.embed("late", [1], "mean")
    bench.turn()
    assert bench.out.errors == {"long": "context_length_exceeded", "empty": "invalid_request", "unknown": "invalid_request", "late": "queue_full"}
    bench.run()
    assert set(bench.out.vectors) == {"whole", "waits"}


def test_a_vector_that_is_not_finite_is_an_error_of_that_text_alone() -> None:
    bench = Bench()
    bench.runner.spoil.add(-1)
    bench.embed("bad", [1, 2], "mean")
    bench.send("good", [1, 2], 3)
    bench.run()
    assert bench.out.errors == {"bad": "non_finite_logits"}
    assert bench.out.tokens["good"] == oracle([1, 2], 3)
    assert not bench.out.vectors


def test_a_step_that_fails_ends_its_texts_and_no_other() -> None:
    bench = Bench(chunk=8)
    bench.embed("a", list(range(20)), "mean")
    bench.turn()
    bench.runner.fail_next = True
    bench.turn()
    assert bench.out.errors == {"a": "internal_error"}
    bench.embed("b", list(range(20)), "mean")
    bench.run()
    assert bench.out.vectors["b"] == pytest.approx(expected(list(range(20)), "mean"))
