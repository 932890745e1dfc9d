"""Chunks that stretch a step as far as is fair to those who stream, whatever the machine is worth."""

from __future__ import annotations

import pytest

from llmd.scheduler.chunk import FIRST_ALONE, FIRST_BESIDE, LEAST, LONGEST_GAP, MOST, ROW_BLOCK, STRETCH, ChunkSizer, longest_step
from llmd.scheduler.estimate import INITIAL, NewTokenRatio
from llmd.scheduler.estimate import LEAST as LEAST_RATIO


@pytest.mark.parametrize(("step", "token", "extra"), [(0.05, 0.001, 0.0), (0.05, 0.0002, 0.01), (0.2, 0.004, 0.02), (0.005, 0.00001, 0.001)])
def test_steps_with_a_prompt_settle_at_the_stretch(step: float, token: float, extra: float) -> None:
    """`extra`: what any prompt costs besides its tokens."""
    sizer = ChunkSizer(None)
    sizer.observe(8, 0, step, sizer.next(8))
    times = [_step(sizer, step, token, extra) for _ in range(250)]
    assert all(0.8 * STRETCH * step < seconds < 1.15 * STRETCH * step for seconds in times[50:]) or sizer.next(8).tokens == MOST
    assert sum(seconds > 3 * step for seconds in times) <= 2, "the 99th percentile keeps the promise, learning included"


def _step(sizer: ChunkSizer, step: float, token: float, extra: float) -> float:
    chunk = sizer.next(8)
    seconds = step + extra + chunk.tokens * token
    sizer.observe(8, chunk.tokens, seconds, chunk)
    return seconds


def test_tokens_that_cost_nothing_up_to_a_point_do_not_lead_far_beyond_it() -> None:
    """Kernels work on tiles of rows: chunks that fill one up are free, the next token is not."""
    sizer = ChunkSizer(None)
    sizer.observe(8, 0, 0.1, sizer.next(8))
    longest = 0.0
    for _ in range(100):
        chunk = sizer.next(8)
        seconds = 0.1 + max(0, chunk.tokens - 100) * 0.005
        sizer.observe(8, chunk.tokens, seconds, chunk)
        longest = max(longest, seconds)
    assert longest < 0.3 and 100 < sizer.next(8).tokens < 130


@pytest.mark.parametrize(
    ("streams", "prompts", "longest"),
    [
        (8, 1, 0.02),  # one prompt beside eight streams: their pace is halved
        (64, 1, 0.02),
        (4, 1, 0.03),  # the fewer they are, and the more wait, the longer
        (16, 8, 0.05),
        (1, 1, 0.09),
        (1, 3, LONGEST_GAP),
        (16, 64, LONGEST_GAP),
    ],
)
def test_a_step_is_as_long_as_those_who_wait_are_many(streams: int, prompts: int, longest: float) -> None:
    assert longest_step(0.01, streams, prompts) == pytest.approx(longest)


def test_a_step_that_is_long_anyway_is_only_stretched() -> None:
    assert longest_step(0.2, 1, 64) == pytest.approx(STRETCH * 0.2)


def test_the_chunk_follows_who_waits_at_once() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(4, 0, 0.01, sizer.next(4))
    for _ in range(20):
        chunk = sizer.next(4)
        sizer.observe(4, chunk.tokens, 0.01 + chunk.tokens * 0.0002, chunk)
    few, many = sizer.next(4, 1).tokens, sizer.next(4, 4).tokens
    assert few == pytest.approx(0.02 / 0.0002, rel=0.2) and many == pytest.approx(0.08 / 0.0002, rel=0.2)


def test_what_a_token_costs_alone_is_the_first_guess_of_what_it_costs_beside_streams() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(0, 512, 0.1024, sizer.next(0))
    sizer.observe(4, 0, 0.01, sizer.next(4))
    assert sizer.next(4, 4).tokens == pytest.approx(0.08 / 0.0004, abs=ROW_BLOCK)


def test_before_anything_is_measured_chunks_are_careful() -> None:
    sizer = ChunkSizer(None)
    assert (sizer.next(0).tokens, sizer.next(16).tokens) == (FIRST_ALONE, FIRST_BESIDE)
    sizer.observe(16, 32, 9.0, sizer.next(16))  # tells nothing as long as a step without a prompt is unknown
    assert sizer.next(16).tokens == FIRST_BESIDE


@pytest.mark.parametrize("streams", [1, 7, 8, 16, 17, 64])
def test_a_step_with_streams_fills_the_rows_that_kernels_compute_at_once(streams: int) -> None:
    size = ChunkSizer(None).next(streams).tokens
    assert FIRST_BESIDE <= size < FIRST_BESIDE + ROW_BLOCK and (size + streams) % ROW_BLOCK == 0


def test_the_short_end_of_a_prompt_tells_nothing() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(16, 0, 0.1, sizer.next(16))
    sizer.observe(16, 3, 5.0, sizer.next(16))
    assert sizer.next(16).tokens == FIRST_BESIDE


def test_alone_a_step_still_ends_soon() -> None:
    slow, fast = ChunkSizer(None), ChunkSizer(None)
    slow.observe(0, 2, 9.0, slow.next(0))
    assert slow.next(0).tokens == FIRST_ALONE
    slow.observe(0, 512, 2.0, slow.next(0))
    fast.observe(0, 512, 0.001, fast.next(0))
    assert slow.next(0).tokens == 256 and fast.next(0).tokens == MOST


def test_a_prompt_that_no_size_suits_still_gets_on() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(16, 0, 0.001, sizer.next(16))
    for _ in range(5):
        sizer.observe(16, sizer.next(16).tokens, 1.0, sizer.next(16))
    assert sizer.next(16).tokens == LEAST


def test_a_fixed_size_is_fixed() -> None:
    sizer = ChunkSizer(100)
    sizer.observe(0, 100, 9.0, sizer.next(0))
    assert sizer.next(0).tokens == sizer.next(9).tokens == 100


def test_the_expected_share_sinks_while_all_goes_well() -> None:
    ratio = NewTokenRatio()
    for _ in range(1000):
        ratio.decoded()
    assert ratio.value == pytest.approx(LEAST_RATIO)
    ratio.idle()
    assert ratio.value == INITIAL


def _settled(streams: int, step: float, token: float) -> ChunkSizer:
    sizer = ChunkSizer(None)
    sizer.observe(streams, 0, step, sizer.next(streams))
    for _ in range(30):
        chunk = sizer.next(streams)
        sizer.observe(streams, chunk.tokens, step + token * chunk.tokens, chunk)
    return sizer


def test_a_prompt_that_is_not_cut_makes_the_next_chunks_no_longer() -> None:
    """One whose logprobs are wanted."""
    sizer = _settled(4, 0.02, 0.0002)
    chunk = sizer.next(4)
    sizer.observe(4, 4000, 0.02 + 4000 * 0.0002, chunk)
    assert sizer.next(4).tokens <= 1.3 * chunk.tokens


def test_a_step_that_is_too_long_tells_so_however_much_of_its_chunk_was_free() -> None:
    sizer = _settled(4, 0.02, 0.0002)
    for _ in range(50):  # everything takes ten times as long now
        chunk = sizer.next(4)
        sizer.observe(4, 0, 0.2, chunk)
        sizer.observe(4, min(70, chunk.tokens), 0.2 + 0.002 * min(70, chunk.tokens), chunk)
    assert 0.2 + 0.002 * sizer.next(4).tokens < 0.45


def test_a_first_step_that_the_machine_held_up_is_forgotten() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(0, 512, 10.0, sizer.next(0))
    assert sizer.next(0).tokens < 64
    for _ in range(300):
        chunk = sizer.next(0)
        sizer.observe(0, chunk.tokens, chunk.tokens * 0.0002, chunk)
    assert sizer.next(0).tokens == MOST


def test_a_chunk_that_was_made_before_steps_became_longer_teaches_what_its_tokens_cost() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(1, 0, 0.005, sizer.next(1))
    chunk = sizer.next(40)
    sizer.observe(40, 0, 0.06, sizer.next(40))
    sizer.observe(40, chunk.tokens, 0.07, chunk)
    assert sizer.next(40).tokens == pytest.approx(0.06 / (0.01 / chunk.tokens), rel=0.1)
