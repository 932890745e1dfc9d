"""What the scheduler promises to each request, whatever the others do and however little memory there is."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.scheduler import prefill
from llmd.scheduler.estimate import NewTokenRatio
from llmd.scheduler.policy import Policy
from tests.unit.scheduler.harness import EOS, PAGE, Bench, next_token, oracle


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64])
def test_prompts_around_page_and_chunk_borders_are_answered_right(length: int) -> None:
    bench = Bench()
    prompt = [(7 * i) % 90 for i in range(length)]
    bench.send("a", prompt, 20)
    bench.run()
    assert bench.out.tokens["a"] == oracle(prompt, 20)
    assert bench.kv.counts.active == 0


def test_prompts_are_computed_in_chunks_beside_decoding_requests() -> None:
    bench = Bench(chunk=8)
    bench.send("short", [1, 2], 30)
    bench.turn()
    bench.send("long", list(range(60)), 4)
    before = len(bench.out.tokens["short"])
    for _ in range(7):
        bench.turn()
        assert bench.runner.step_sizes[-1] <= 8 + 1
    assert len(bench.out.tokens["short"]) == before + 7, "decode goes on while a prompt is computed"
    bench.run()
    assert bench.out.tokens["long"] == oracle(list(range(60)), 4)
    assert bench.out.tokens["short"] == oracle([1, 2], 30)


def test_retraction_loses_and_doubles_nothing_and_the_oldest_is_never_retracted() -> None:
    bench = Bench(pages=100, max_running=8, context=256)
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(8)}
    for rid, prompt in prompts.items():
        bench.send(rid, prompt, 200)
    ended: list[str] = []
    while bench.turn():
        ended += [rid for rid, chunk in bench.out.last.items() if chunk.finish and rid not in ended]
    assert bench.counter("llmd_requests_retracted_total") > 0
    assert ended[0] == "r0"
    for rid, prompt in prompts.items():
        assert bench.out.tokens[rid] == oracle(prompt, 200)


events = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 40), st.integers(0, 60)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("turn"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=250, deadline=None)
@given(
    events=events,
    pages=st.integers(24, 60),
    max_running=st.integers(1, 6),
    chunk=st.sampled_from([1, 5, 16, 64]),
    ratio=st.sampled_from([0.0, 0.1, 0.7]),
    radix=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm", "priority"]),
    share=st.sampled_from([1, 8, 10_000]),
    overlap=st.booleans(),
)
def test_any_mix_of_arrivals_aborts_and_faults_keeps_the_books_and_every_answer(
    events: list[tuple[str, int, int]], pages: int, max_running: int, chunk: int, ratio: float, radix: bool, policy: Policy, share: int, overlap: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "SHARE_TOKENS", share)  # from never computing a prefix twice at once to always
        bench = Bench(pages=pages, max_running=max_running, context=96, chunk=chunk, radix=radix, policy=policy, overlap=overlap)
        bench.scheduler.decode.ratio = NewTokenRatio(ratio)  # with little expected, retraction is frequent
        with contextlib.closing(bench):
            _play(events, bench, pages)


def _play(events: list[tuple[str, int, int]], bench: Bench, pages: int) -> None:
    sent: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for kind, first, second in events:
        if kind == "send":
            rid = f"r{len(sent)}"
            # Three families of prompts with common beginnings of many lengths.
            sent[rid] = ([(second % 3 * 3 + j if j < first - second % 5 else first + j) % 90 for j in range(first)], second)
            bench.send(rid, *sent[rid], priority=first % 3)
        elif kind == "abort" and sent:
            rid = f"r{first % len(sent)}"
            aborted.add(rid)
            bench.abort(rid)
        elif kind == "fail":
            bench.runner.fail_next = True
        else:
            for _ in range(first):
                bench.turn()
    bench.runner.fail_next = False
    bench.run()
    assert bench.kv.counts.active == 0 and bench.kv.rows.active == 0
    for rid, (prompt, count) in sent.items():
        tokens = oracle(prompt, min(count, 96 - len(prompt)))
        got = bench.out.tokens[rid]
        if rid in bench.out.first:
            assert bench.out.first[rid].cached_tokens < len(prompt)
        if rid in bench.out.errors or rid in aborted:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
            finish = bench.out.last[rid].finish
            assert finish is not None and finish.reason == "length"
    bench.kv.flush()
    assert bench.kv.pages.pages_free == pages
    assert bench.counter("llmd_kv_accounting_errors_total") == 0


def test_strict_order_of_arrival_and_no_more_than_allowed_run() -> None:
    bench = Bench(max_running=2)
    for i in range(6):
        bench.send(f"r{i}", [i], 5 + i)
    order: list[str] = []
    while bench.turn():
        assert len(bench.scheduler.decode.running) <= 2
        order += [rid for rid in bench.out.first if rid not in order]
    assert order == [f"r{i}" for i in range(6)]


def test_a_large_head_of_the_queue_is_not_passed_by_small_ones() -> None:
    bench = Bench(pages=20, context=80)
    bench.send("running", [1] * 30, 20)
    bench.turn()
    bench.send("large", [2] * 60, 4)
    bench.send("small", [3], 1)
    bench.turn()
    assert [req.rid for req in bench.scheduler.waiting] == ["large", "small"]
    bench.run()
    assert list(bench.out.first) == ["running", "large", "small"]


def test_stop_token_on_the_last_allowed_token_is_a_stop() -> None:
    prompt = [5, 6]
    third = next_token(prompt + oracle(prompt, 2), 2)
    bench = Bench()
    bench.send("a", prompt, 3, stop_token_ids=(third,))
    bench.run()
    finish = bench.out.last["a"].finish
    assert finish is not None and (finish.reason, finish.matched) == ("stop", third)


def test_end_of_sequence_is_banned_until_the_minimum() -> None:
    bench = Bench()
    bench.send("a", [1], 5, min_new_tokens=2)
    bench.scheduler.receive(lambda command: None)
    req = bench.scheduler.waiting.head(0.0)
    assert req is not None
    assert list(req.banned_ids) == [EOS]
    req.output_ids += [1, 2]
    assert list(req.banned_ids) == []


def test_a_resubmission_continues_and_prefills_its_output_too() -> None:
    bench = Bench()
    prompt, whole = [4, 5, 6], oracle([4, 5, 6], 20)
    bench.send("a", prompt, 20, output_ids=whole[:7])
    bench.run()
    assert (bench.out.first["a"].first, bench.out.first["a"].token_ids) == (0, whole[:8])
    assert bench.out.tokens["a"] == whole


def test_logits_that_are_not_finite_cost_their_request_only() -> None:
    bench = Bench()
    bench.send("good", [1], 3)
    bench.send("bad", [2], 9)
    bench.runner.spoil = {4}
    bench.run()
    assert bench.out.errors == {"bad": "non_finite_logits"}
    assert bench.out.tokens["good"] == oracle([1], 3)
    assert bench.out.forgotten == ["bad"]


def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    bench = Bench(max_running=2)
    for rid in ("a", "b", "c"):
        bench.send(rid, [1, 2, 3], 10)
    bench.turn()
    bench.runner.fail_next = True
    bench.run()
    assert bench.out.errors == {} and not bench.scheduler.suspects.any
    assert all(bench.out.tokens[rid] == oracle([1, 2, 3], 10) for rid in ("a", "b", "c"))


def test_a_failed_step_with_broken_books_is_not_survived() -> None:
    bench = Bench()
    bench.send("a", [1, 2, 3], 10)
    bench.turn()
    bench.kv.pages.alloc(1)
    bench.scheduler.receive(lambda command: None)
    batch = bench.scheduler.schedule()
    bench.runner.fail_next = True
    with pytest.raises(RuntimeError, match="KV accounting"):
        bench.scheduler.step(batch)


def test_a_leak_found_when_idle_is_counted_and_healed() -> None:
    bench = Bench()
    bench.kv.pages.alloc(3)
    bench.scheduler.check_idle()
    assert bench.counter("llmd_kv_accounting_errors_total") == 1
    assert bench.kv.counts.active == 0


def test_prompt_logprobs_come_once_with_the_first_chunk_and_are_never_cut_by_chunks() -> None:
    bench = Bench(chunk=8)
    prompt = list(range(1, 31))
    bench.send("a", prompt, 3, prompt_logprobs=True)
    bench.send("scored", prompt, 0, prompt_logprobs=True)
    bench.run()
    for rid in ("a", "scored"):
        entries = bench.out.first[rid].prompt_logprobs
        assert entries is not None and [entry.token_id for entry in entries] == prompt
        assert [entry.logprob for entry in entries] == [None, *(-float(token) for token in prompt[1:])]
    assert bench.out.tokens["scored"] == [] and bench.out.tokens["a"] == oracle(prompt, 3)
    assert bench.out.last["a"].prompt_logprobs is None


def test_while_output_is_blocked_nothing_runs_and_aborts_still_work() -> None:
    bench = Bench()
    bench.send("a", [1], 10)
    bench.send("b", [2], 10)
    bench.turn()
    bench.out.blocked = True
    assert not bench.turn()
    bench.abort("a")
    assert not bench.turn()
    bench.out.blocked = False
    bench.run()
    assert bench.out.tokens["b"] == oracle([2], 10) and len(bench.out.tokens["a"]) == 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    bench = Bench(pages=4, context=64)
    bench.send("fits", [1] * 10, 4 * PAGE - 10)
    bench.send("never", [1] * 10, 4 * PAGE - 9)
    bench.run()
    assert bench.out.errors == {"never": "exceeds_kv_capacity"}
    assert bench.out.tokens["fits"] == oracle([1] * 10, 6)


def test_the_queue_bound_counts_what_has_no_slot() -> None:
    bench = Bench(max_running=1, max_queued=8)
    for i in range(50):
        bench.send(f"r{i}", [1], 2)
    bench.run()
    assert len(bench.out.errors) == 41 and set(bench.out.errors.values()) == {"queue_full"}
