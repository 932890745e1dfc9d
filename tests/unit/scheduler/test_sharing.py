"""What requests with common beginnings get from one another: the same answers, sooner, and no page twice or lost."""

from __future__ import annotations

import random

import pytest

from llmd.scheduler import prefill
from tests.unit.scheduler.harness import Bench, oracle


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=length)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_cached_tokens_are_whole_pages_and_never_the_whole_prompt(page_size: int) -> None:
    bench = Bench(pages=4096 // page_size, page_size=page_size, context=256, chunk=64)
    whole = prompt_of(200)
    for turn in range(3):
        for length in (1, 15, 16, 17, 31, 32, 33, 65):
            rid, prompt = f"{turn}-{length}", whole[: length + 40 * (turn // 2)]  # asked, asked again, extended
            bench.send(rid, prompt, 5)
            bench.run()
            assert bench.out.tokens[rid] == oracle(prompt, 5)
            cached = bench.out.first[rid].cached_tokens
            assert 0 <= cached <= len(prompt) - 1 and cached % page_size == 0
            assert turn == 0 or cached == (len(prompt) - 1) // page_size * page_size or turn == 2
    queried, hit = (bench.counter(f"llmd_prefix_cache_{name}_tokens_total") for name in ("queried", "hit"))
    assert 0 < hit < queried


def test_an_answer_is_known_to_the_next_turn_of_its_chat() -> None:
    bench = Bench()
    prompt = prompt_of(20)
    bench.send("a", prompt, 13)
    bench.run()
    following = prompt + oracle(prompt, 13) + [1, 2, 3]
    bench.send("b", following, 5)
    bench.run()
    assert bench.out.first["b"].cached_tokens == 32
    assert bench.out.tokens["b"] == oracle(following, 5)


@pytest.mark.parametrize("wait_for_twins", [True, False])
def test_equal_prompts_at_once_are_computed_once_and_duplicates_are_freed_safely(wait_for_twins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not wait_for_twins:
        monkeypatch.setattr(prefill, "SHARE_TOKENS", 10**9)
    bench = Bench(pages=1200, page_size=4, max_running=16, context=1024, chunk=64)
    prompt = prompt_of(500)
    for i in range(8):
        bench.send(f"twin{i}", prompt, 200)
    for turn in range(400):
        bench.turn()
        if turn % 4 == 0:  # fresh prompts take the pages that duplicates have left
            bench.send(f"fresh{turn}", prompt_of(60, seed=turn), 10)
    bench.run()
    for i in range(8):
        assert bench.out.tokens[f"twin{i}"] == oracle(prompt, 200)
    for turn in range(0, 400, 4):
        assert bench.out.tokens[f"fresh{turn}"] == oracle(prompt_of(60, seed=turn), 10)
    if wait_for_twins:
        assert [bench.out.first[f"twin{i}"].cached_tokens for i in range(8)] == [0, *[496] * 7]


def test_cached_pages_are_given_up_before_anybody_is_retracted() -> None:
    bench = Bench(pages=40, context=128)
    for i in range(10):
        bench.send(f"r{i}", prompt_of(30, seed=i), 60)
        bench.run()
        assert bench.out.tokens[f"r{i}"] == oracle(prompt_of(30, seed=i), 60)
    assert bench.counter("llmd_requests_retracted_total") == 0
    assert bench.kv.counts.cached > 0


def test_a_retracted_request_finds_its_own_tokens_but_reports_only_what_was_there_before() -> None:
    bench = Bench(pages=40, max_running=8, context=128)
    bench.scheduler.decode.ratio.value = 0.0
    prompts = {f"r{i}": prompt_of(9, seed=i) for i in range(8)}
    for rid, prompt in prompts.items():
        bench.send(rid, prompt, 60)
    bench.run()
    assert bench.counter("llmd_requests_retracted_total") > 0
    for rid, prompt in prompts.items():
        assert bench.out.tokens[rid] == oracle(prompt, 60)
        assert bench.out.last[rid].cached_tokens <= 8
    assert bench.counter("llmd_prefix_cache_queried_tokens_total") == 8 * 9, "each prompt is counted once"


def test_what_gave_no_finite_result_is_not_reused() -> None:
    bench = Bench()
    bench.runner.spoil = {0}
    bench.send("bad", prompt_of(30), 5)
    bench.run()
    assert bench.out.errors == {"bad": "non_finite_logits"} and bench.kv.counts.cached == 0


def test_switched_off_nothing_is_kept() -> None:
    bench = Bench(radix=False)
    for rid in ("a", "b"):
        bench.send(rid, prompt_of(30), 5)
        bench.run()
        assert bench.out.first[rid].cached_tokens == 0 and bench.kv.pages.pages_free == 64
    assert bench.counter("llmd_prefix_cache_queried_tokens_total") == 0


def test_other_weights_share_nothing() -> None:
    bench = Bench()
    bench.send("a", prompt_of(30), 5)
    bench.run()
    bench.kv.weights_version = "new"
    bench.send("b", prompt_of(30), 5)
    bench.run()
    assert bench.out.first["b"].cached_tokens == 0


def test_prompt_logprobs_are_computed_for_every_token_and_their_kv_serves_others() -> None:
    bench = Bench()
    for rid, wanted in (("a", True), ("b", True), ("c", False)):
        bench.send(rid, prompt_of(30), 3, prompt_logprobs=wanted)
        bench.run()
    entries = bench.out.first["b"].prompt_logprobs
    assert entries is not None and len(entries) == 30
    assert [bench.out.first[rid].cached_tokens for rid in "abc"] == [0, 0, 28]


def _crowd(requests: int, *, seed: int, radix: bool = True) -> None:
    """Shared prefixes of several depths, 16 at once, memory for six of them."""
    dice = random.Random(seed)
    bench = Bench(pages=130, page_size=4, max_running=16, context=256, chunk=24, max_queued=20, radix=radix)
    bench.scheduler.decode.ratio.value = 0.1
    trunks = [prompt_of(depth, seed=depth) for depth in (7, 16, 33, 50)]
    sent: dict[str, tuple[list[int], int]] = {}
    for i in range(requests):
        prompt = dice.choice(trunks)[: dice.choice([5, 16, 40, 50])] + prompt_of(dice.randrange(1, 30), seed=dice.randrange(requests))
        sent[f"r{i}"] = prompt, dice.randrange(1, 60)
        bench.send(f"r{i}", *sent[f"r{i}"])
        if dice.random() < 0.1:
            bench.abort(f"r{i}")
        if dice.random() < 0.1:
            bench.send(f"over{i}", prompt_of(300), 5)
        while bench.scheduler.in_flight + len(bench.source.queue) >= 16:
            bench.turn()
    bench.run()
    for rid, (prompt, count) in sent.items():
        got = bench.out.tokens[rid]
        assert got == oracle(prompt, count)[: len(got)]
        assert rid not in bench.out.last or bench.out.last[rid].finish is None or len(got) == count
    assert sum(bench.out.last[rid].finish is not None for rid in bench.out.last) > 0.85 * requests
    assert bench.counter("llmd_requests_retracted_total") > 0
    bench.scheduler.check_idle(thoroughly=True)
    assert bench.counter("llmd_kv_accounting_errors_total") == 0
    assert bench.kv.counts.active == 0 and bench.kv.cache is not None and bench.kv.cache.pages_locked == 0
    bench.kv.flush()
    assert bench.kv.pages.pages_free == 130


def test_a_crowd_in_too_little_memory_gets_what_each_would_get_alone() -> None:
    _crowd(300, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_long_crowd() -> None:
    for seed in range(5):
        _crowd(3000, seed=seed)
