"""The last quarter of an hour in a few numbers (`GET /v1/history`), so that a dashboard that has just been opened has charts.

Owned by the control app, which calls `beat` with the heartbeats that come anyway; one sample is kept every EVERY seconds. A replaced control begins anew.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct, structs

from llmd.control import status
from llmd.control.core import Core
from llmd.control.status import Rates
from llmd.wire.messages import HistogramTotals

#: Seconds between two samples, and for how long they are kept.
EVERY: Final = 5.0
SPAN: Final = 900.0
#: Seconds over which medians are taken.
_WINDOW: Final = 60.0
_FIRST_TOKEN: Final = "llmd_time_to_first_token_seconds"
_BETWEEN: Final = "llmd_inter_token_latency_seconds"

Histograms = dict[str, HistogramTotals]


class Sample(Struct, frozen=True):
    """What it was like at `at` (monotonic)."""

    at: float
    generation_tokens_s: float
    prompt_tokens_s: float
    running: int
    waiting: int
    kv_used: float | None
    """Share of the pages that are not free; None without an engine."""
    first_token_s: float | None
    """Median of the minute before; None where nothing was counted."""
    between_tokens_s: float | None


class History:
    """See the module. `rates` has the tokens per second of right now."""

    def __init__(self, core: Core) -> None:
        self.rates = Rates()
        self._core = core
        self._samples: deque[Sample] = deque(maxlen=round(SPAN / EVERY))
        self._counted: deque[tuple[float, Histograms]] = deque()

    def beat(self, now: float) -> None:
        """Take a sample if one is due. `now` is monotonic."""
        # What is due within half a period is taken now: a beat is never exactly there.
        if not self._samples or now - self._samples[-1].at >= EVERY - self._core.boot.args.supervision.heartbeat / 2:
            self._samples.append(self._sample(now))

    def shown(self, now: float) -> dict[str, Any]:
        """`GET /v1/history`: oldest first."""
        samples = []
        for sample in self._samples:
            fields = structs.asdict(sample)
            at = fields.pop("at")
            samples.append({"age_s": round(now - at, 1), **fields})
        return {"every_s": EVERY, "span_s": SPAN, "samples": samples}

    def _sample(self, now: float) -> Sample:
        histograms = self._core.ledger.histograms()
        self._counted.append((now, {name: histograms[name] for name in (_FIRST_TOKEN, _BETWEEN) if name in histograms}))
        while len(self._counted) > 2 and now - self._counted[1][0] >= _WINDOW:
            self._counted.popleft()
        counts, pages, speed = status.requests(self._core), status.kv(self._core), self.rates.throughput()
        total = pages["pages_total"]
        return Sample(
            at=now,
            generation_tokens_s=speed["generation_tokens_s"],
            prompt_tokens_s=speed["prompt_tokens_s"],
            running=counts["running"],
            waiting=counts["waiting"],
            kv_used=round(1 - pages["pages_free"] / total, 4) if total else None,
            first_token_s=self._median(_FIRST_TOKEN),
            between_tokens_s=self._median(_BETWEEN),
        )

    def _median(self, name: str) -> float | None:
        last, before = self._counted[-1][1].get(name), self._counted[0][1].get(name)
        if last is None or len(self._counted) < 2:
            return None
        return median(last.bounds, tuple(a - b for a, b in zip(last.counts, before.counts, strict=True)) if before is not None else last.counts)


def median(bounds: tuple[float, ...], counts: tuple[int, ...]) -> float | None:
    """Of cumulative counts (the last one for +Inf), linear within a bucket as Prometheus has it; None without observations."""
    if not counts or counts[-1] <= 0:
        return None
    half = counts[-1] / 2
    edges = pairwise(zip((0.0, *bounds), (0, *counts[:-1]), strict=True))  # (below, observations up to it), (bound, observations up to it)
    for (low, below), (bound, count) in edges:
        if count >= half:
            return round(low + (bound - low) * (half - below) / (count - below), 6)
    return bounds[-1]
