"""A worker's metrics: totals since its start, sent with each heartbeat; control adds the differences up (llmd.control.metrics)."""

from __future__ import annotations

import bisect
import itertools
from functools import lru_cache

from llmd.wire.messages import HistogramTotals, Totals

#: Seconds. From one fast token to a long answer.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@lru_cache(maxsize=4096)
def series(name: str, labels: tuple[tuple[str, str], ...] = ()) -> str:
    """`name{a="x",b="y"}`: the key of one series. Labels never hold a client's value, so escaping is left out."""
    return name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels) + "}" if labels else "")


class Histogram:
    """One series of observations, for those who have them too often to look it up each time."""

    __slots__ = ("_last", "_seen", "bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._seen: tuple[int, float] | None = None
        self._last = HistogramTotals(bounds, tuple(self.counts), 0.0)

    def observe(self, value: float) -> None:
        """Put one in (seconds, mostly)."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def totals(self) -> HistogramTotals:
        """`counts` become cumulative; the same object while nothing has been put in. For one thread."""
        seen = sum(self.counts), self.sum
        if seen != self._seen:
            self._seen, self._last = seen, HistogramTotals(self.bounds, tuple(itertools.accumulate(self.counts)), self.sum)
        return self._last


class Meter:
    """Counters, gauges and histograms of one process. Written by the work loop, read by the heartbeat thread."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def inc(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        key = series(name, tuple(labels.items()))
        self._counters[key] = self._counters.get(key, 0.0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._gauges[series(name, tuple(labels.items()))] = value

    def observe(self, name: str, value: float, bounds: tuple[float, ...] = LATENCY_BOUNDS, **labels: str) -> None:
        """Put one observation (seconds, mostly) into a histogram."""
        self.histogram(name, bounds, **labels).observe(value)

    def histogram(self, name: str, bounds: tuple[float, ...] = LATENCY_BOUNDS, **labels: str) -> Histogram:
        """The series itself; it is shown from now on."""
        key = series(name, tuple(labels.items()))
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(bounds)
        return found

    def snapshot(self) -> Totals:
        """A copy for the wire."""
        return Totals(dict(self._counters), dict(self._gauges), {key: histogram.totals() for key, histogram in list(self._histograms.items())})
