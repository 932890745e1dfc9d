"""Reads Prometheus' text as far as the dashboard needs it: counters, gauges, and percentiles of what a histogram has counted lately."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping

#: Series -> value; a series is its name with its labels as they are written.
Values = Mapping[str, float]
#: (upper bound, observations up to it), rising.
Buckets = tuple[tuple[float, float], ...]

_LABEL = re.compile(r'(\w+)="([^"]*)"')
#: Seconds over which percentiles are taken.
WINDOW = 60.0


def parse(text: str) -> dict[str, float]:
    """The series of an exposition; lines that are none are left out."""
    values = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series and not line.startswith("#"):
            try:
                values[series] = float(value)
            except ValueError:
                continue
    return values


def labelled(values: Values, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """(labels, value) of each series of this name."""
    for series, value in values.items():
        if series.startswith(name + "{"):
            yield dict(_LABEL.findall(series)), value


def buckets(values: Values, name: str) -> Buckets:
    """Those of a histogram, all its series added up."""
    found: dict[float, float] = {}
    for labels, value in labelled(values, f"{name}_bucket"):
        bound = float(labels["le"])
        found[bound] = found.get(bound, 0.0) + value
    return tuple(sorted(found.items()))


def quantile(share: float, counts: Buckets) -> float | None:
    """The value below which `share` of the observations are, as Prometheus estimates it (linear within a bucket); None without observations."""
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


class Recent:
    """What a histogram has counted in the last WINDOW seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept: deque[tuple[float, Buckets]] = deque()

    def take(self, values: Values, now: float) -> None:
        """Another look at it."""
        counts = buckets(values, self.name)
        if not counts:
            return
        if self._kept and (len(self._kept[-1][1]) != len(counts) or counts[-1][1] < self._kept[-1][1][-1][1]):
            self._kept.clear()  # another daemon
        self._kept.append((now, counts))
        while len(self._kept) > 2 and now - self._kept[1][0] >= WINDOW:
            self._kept.popleft()

    def quantile(self, share: float) -> float | None:
        """In seconds; None where nothing was counted lately."""
        if len(self._kept) < 2:
            return None
        first, last = self._kept[0][1], self._kept[-1][1]
        return quantile(share, tuple((bound, count - before) for (bound, count), (_, before) in zip(last, first, strict=True)))

    def since_start(self, share: float) -> float | None:
        """The same of all that was ever counted."""
        return quantile(share, self._kept[-1][1]) if self._kept else None
