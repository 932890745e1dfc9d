"""Counters that never go down: the sum over all incarnations of all workers, across control's own replacement.

A worker sends totals since its start, with its incarnation. The ledger keeps the last totals of each worker's current
incarnation beside a base that holds all finished ones and control's own counters; a value is base + current ones. When a
worker comes back with a higher incarnation, its old totals are folded into the base. Nothing here is lost with control: the
data is in control.state, and whatever happened since is in the workers' next heartbeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from msgspec import Struct

from llmd.observability.totals import series
from llmd.wire.messages import HistogramTotals, Totals

_KEY = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-zA-Z_]\w*="[^"\\\n]*"(,[a-zA-Z_]\w*="[^"\\\n]*")*\})?')


class Current(Struct):
    """Totals of one worker's current incarnation."""

    incarnation: int
    counters: dict[str, float] = {}
    histograms: dict[str, HistogramTotals] = {}


class LedgerData(Struct):
    """What is kept in control.state."""

    counters: dict[str, float] = {}
    histograms: dict[str, HistogramTotals] = {}
    current: dict[str, Current] = {}


def valid_key(key: str) -> bool:
    """Whether `key` may be written into the exposition as it is."""
    return _KEY.fullmatch(key) is not None


class Ledger:
    """See the module."""

    def __init__(self, data: LedgerData | None = None) -> None:
        self.data = data or LedgerData()
        self._sums: dict[str, float] | None = None
        """What `counters` has last given, while nothing has changed."""

    def inc(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter of control's own."""
        self._sums = None
        _add(self.data.counters, series(name, tuple(labels.items())), value)

    def take(self, worker: str, incarnation: int, totals: Totals, extra: Mapping[str, float] | None = None) -> None:
        """Take in a worker's totals. Those of an older incarnation, and values that cannot be, are ignored."""
        current = self.data.current.get(worker)
        if current is not None and incarnation < current.incarnation:
            return
        if current is None or incarnation > current.incarnation:
            if current is not None:
                self._fold(current)
            current = self.data.current[worker] = Current(incarnation)
        for key, value in {**totals.counters, **(extra or {})}.items():
            known = current.counters.get(key)
            if value != known and math.isfinite(value) and value >= (known or 0.0) and (known is not None or valid_key(key)):
                current.counters[key], self._sums = value, None
        for key, histogram in totals.histograms.items():
            known_histogram = current.histograms.get(key)
            if histogram != known_histogram and _sound(histogram, known_histogram) and (known_histogram is not None or valid_key(key)):
                current.histograms[key] = histogram

    def counters(self) -> Mapping[str, float]:
        """All counters, added up; the same object while none of them has changed."""
        if self._sums is None:
            self._sums = dict(self.data.counters)
            for current in self.data.current.values():
                for key, value in current.counters.items():
                    _add(self._sums, key, value)
        return self._sums

    def histograms(self) -> dict[str, HistogramTotals]:
        """All histograms, added up."""
        result = dict(self.data.histograms)
        for current in self.data.current.values():
            for key, histogram in current.histograms.items():
                result[key] = _merge(result.get(key), histogram)
        return result

    def _fold(self, current: Current) -> None:
        for key, value in current.counters.items():
            _add(self.data.counters, key, value)
        for name, histogram in current.histograms.items():
            self.data.histograms[name] = _merge(self.data.histograms.get(name), histogram)


def _add(counters: dict[str, float], key: str, value: float) -> None:
    counters[key] = counters.get(key, 0.0) + value


def _sound(new: HistogramTotals, old: HistogramTotals | None) -> bool:
    """Cumulative, of one shape, and not smaller than before."""
    if len(new.counts) != len(new.bounds) + 1 or not math.isfinite(new.sum) or list(new.counts) != sorted(new.counts):
        return False
    return old is None or (old.bounds == new.bounds and all(a <= b for a, b in zip(old.counts, new.counts, strict=True)))


def _merge(one: HistogramTotals | None, other: HistogramTotals) -> HistogramTotals:
    if one is None or one.bounds != other.bounds:
        return other if one is None or other.counts[-1] >= one.counts[-1] else one
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return HistogramTotals(one.bounds, counts, one.sum + other.sum)
