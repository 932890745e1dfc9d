"""Chunks that stretch a step to twice its length, whatever the machine is worth."""

from __future__ import annotations

import pytest

from llmd.scheduler.chunk import FIRST_ALONE, FIRST_BESIDE, LEAST, MOST, ROW_BLOCK, STRETCH, ChunkSizer
from llmd.scheduler.estimate import INITIAL, NewTokenRatio
from llmd.scheduler.estimate import LEAST as LEAST_RATIO


@pytest.mark.parametrize(("step", "token", "extra"), [(0.05, 0.001, 0.0), (0.05, 0.0002, 0.01), (0.2, 0.004, 0.02), (0.005, 0.00001, 0.001)])
def test_steps_with_a_prompt_settle_at_the_stretch(step: float, token: float, extra: float) -> None:
    """`extra`: what any prompt costs besides its tokens."""
    sizer = ChunkSizer(None)
    sizer.observe(8, 0, step)
    times = [_step(sizer, step, token, extra) for _ in range(250)]
    assert all(0.8 * STRETCH * step < seconds < 1.15 * STRETCH * step for seconds in times[50:]) or sizer.size(8) == MOST
    assert sum(seconds > 3 * step for seconds in times) <= 2, "the 99th percentile keeps the promise, learning included"


def _step(sizer: ChunkSizer, step: float, token: float, extra: float) -> float:
    size = sizer.size(8)
    seconds = step + extra + size * token
    sizer.observe(8, size, seconds)
    return seconds


def test_tokens_that_cost_nothing_up_to_a_point_do_not_lead_far_beyond_it() -> None:
    """Kernels work on tiles of rows: chunks that fill one up are free, the next token is not."""
    sizer = ChunkSizer(None)
    sizer.observe(8, 0, 0.1)
    longest = 0.0
    for _ in range(100):
        size = sizer.size(8)
        seconds = 0.1 + max(0, size - 100) * 0.005
        sizer.observe(8, size, seconds)
        longest = max(longest, seconds)
    assert longest < 0.3 and 100 < sizer.size(8) < 130


def test_before_anything_is_measured_chunks_are_careful() -> None:
    sizer = ChunkSizer(None)
    assert (sizer.size(0), sizer.size(16)) == (FIRST_ALONE, FIRST_BESIDE)
    sizer.observe(16, 32, 9.0)  # tells nothing as long as a step without a prompt is unknown
    assert sizer.size(16) == FIRST_BESIDE


@pytest.mark.parametrize("streams", [1, 7, 8, 16, 17, 64])
def test_a_step_with_streams_fills_the_rows_that_kernels_compute_at_once(streams: int) -> None:
    size = ChunkSizer(None).size(streams)
    assert FIRST_BESIDE <= size < FIRST_BESIDE + ROW_BLOCK and (size + streams) % ROW_BLOCK == 0


def test_the_short_end_of_a_prompt_tells_nothing() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(16, 0, 0.1)
    sizer.observe(16, 3, 5.0)
    assert sizer.size(16) == FIRST_BESIDE


def test_alone_a_step_still_ends_soon() -> None:
    slow, fast = ChunkSizer(None), ChunkSizer(None)
    slow.observe(0, 2, 9.0)
    assert slow.size(0) == FIRST_ALONE
    slow.observe(0, 512, 2.0)
    fast.observe(0, 512, 0.001)
    assert slow.size(0) == 256 and fast.size(0) == MOST


def test_a_prompt_that_no_size_suits_still_gets_on() -> None:
    sizer = ChunkSizer(None)
    sizer.observe(16, 0, 0.001)
    for _ in range(5):
        sizer.observe(16, sizer.size(16), 1.0)
    assert sizer.size(16) == LEAST


def test_a_fixed_size_is_fixed() -> None:
    sizer = ChunkSizer(100)
    sizer.observe(0, 100, 9.0)
    assert sizer.size(0) == sizer.size(9) == 100


def test_the_expected_share_sinks_while_all_goes_well() -> None:
    ratio = NewTokenRatio()
    for _ in range(1000):
        ratio.decoded()
    assert ratio.value == pytest.approx(LEAST_RATIO)
    ratio.idle()
    assert ratio.value == INITIAL
