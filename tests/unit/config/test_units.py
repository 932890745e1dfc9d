"""Durations and sizes: what is written is read back exactly, ambiguity is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmd.config.units import LONGEST, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("0s", 0.0), ("500ms", 0.5), ("30s", 30.0), ("1.5s", 1.5), ("10min", 600.0), ("1h", 3600.0), ("1d", 86400.0), ("0.1s", 0.1)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["30", "5m", "-5s", "", "s", "1h30min", "1e3s", "25d", "inf", "٣s", "３s", "1_0s", "9" * 40 + "s"])
def test_ambiguous_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|unit|at most"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1024", 1024), ("8MiB", 8 * 2**20), ("1GB", 10**9), ("1.5KiB", 1536), ("1 TiB", 2**40)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8M", "8mb", "1.5B", "-1", "", "８MiB", "99999999TiB"])
def test_ambiguous_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit|whole"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.5, "500ms"), (1.0, "1s"), (60.0, "60s"), (75.0, "75s"), (600.0, "10min"), (3600.0, "1h"), (7200.0, "2h"), (0.0005, "0.0005s")],
)
def test_durations_are_written_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=LONGEST))
def test_any_duration_reads_back(seconds: float) -> None:
    if len(format_duration(seconds)) <= 31:
        assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_any_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size
