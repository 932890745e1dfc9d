"""The last quarter of an hour: a sample every five seconds, whatever the heartbeat; medians of the last minute; bounded."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from llmd.control.history import History, median
from llmd.control.ledger import Ledger
from llmd.wire.messages import HistogramTotals, Totals

FIRST = "llmd_time_to_first_token_seconds"


class Engine:
    """What of a core is read: the ledger, gauges, and the facts of one ready scheduler."""

    can_generate = True

    def __init__(self, heartbeat: float = 0.5) -> None:
        self.ledger = Ledger()
        self.gauges: dict[str, float] = {}
        self.pages = 100
        self.boot = SimpleNamespace(args=SimpleNamespace(supervision=SimpleNamespace(heartbeat=heartbeat), memory=SimpleNamespace(page_size=16)))

    def gauge(self, name: str) -> float | None:
        return self.gauges.get(name)

    def ready_workers(self, role: str) -> list[Any]:
        return [SimpleNamespace(info={"kv": {"page_size": 16, "pages_total": self.pages}})] if self.pages else []

    def counted(self, *counts: int) -> None:
        self.ledger.take("frontend-0", 1, Totals(histograms={FIRST: HistogramTotals((0.1, 1.0), counts, 1.0)}))


def history_of(engine: Engine) -> History:
    core: Any = engine
    return History(core)


@pytest.mark.parametrize("heartbeat", [0.1, 0.5, 2.0])
def test_a_sample_every_five_seconds_and_no_more_than_a_quarter_of_an_hour(heartbeat: float) -> None:
    history = history_of(Engine(heartbeat))
    now, beats = 1000.0, round(2000 / heartbeat)
    for _ in range(beats):
        now += heartbeat
        history.beat(now)
    samples = history.shown(now)["samples"]
    assert len(samples) == 180 and samples[0]["age_s"] > samples[-1]["age_s"] >= 0
    between = [before["age_s"] - after["age_s"] for before, after in pairwise(samples)]
    assert all(4.0 <= step <= 6.0 for step in between)


def test_a_sample_says_what_it_was_like() -> None:
    engine = Engine()
    history = history_of(engine)
    engine.gauges = {"llmd_requests_running": 3.0, "llmd_requests_waiting": 1.0, 'llmd_kv_pages{state="free"}': 75.0}
    for at, tokens in ((0.0, 0.0), (5.0, 500.0)):
        history.rates.sample({"llmd_generation_tokens_total": tokens, "llmd_prompt_tokens_total": 2 * tokens}, at)
        history.beat(at)
    last = history.shown(7.0)["samples"][-1]
    assert last == {
        "age_s": 2.0, "generation_tokens_s": 100.0, "prompt_tokens_s": 200.0, "running": 3, "waiting": 1, "kv_used": 0.25, "first_token_s": None,
        "between_tokens_s": None,
    }  # fmt: skip
    engine.pages = 0
    history.beat(10.0)
    assert history.shown(10.0)["samples"][-1]["kv_used"] is None, "without an engine nobody knows"


def test_medians_are_those_of_the_last_minute() -> None:
    engine = Engine()
    history = history_of(engine)
    engine.counted(0, 50, 50)
    seen = []
    for at in range(0, 130, 5):
        if at == 5:
            engine.counted(0, 60, 60)  # ten slow ones
        if at == 70:
            engine.counted(20, 80, 80)  # twenty fast ones
        history.beat(float(at))
        seen.append(history.shown(float(at))["samples"][-1]["first_token_s"])
    assert seen[0] is None, "what was before is not of this minute"
    assert seen[1] == pytest.approx(0.55) and seen[13] is None and seen[14] == pytest.approx(0.05)


@pytest.mark.parametrize(("counts", "expected"), [((), None), ((0, 0, 0), None), ((10, 18, 20), 0.1), ((0, 10, 10), 0.55), ((0, 0, 5), 1.0)])
def test_a_median_is_linear_within_its_bucket_and_no_more_than_the_last_bound(counts: tuple[int, ...], expected: float | None) -> None:
    assert median((0.1, 1.0), counts) == (None if expected is None else pytest.approx(expected))
