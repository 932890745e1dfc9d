"""Counters never go down, whoever dies; nothing a worker sends can break the exposition."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmd.control.catalog import CATALOG
from llmd.control.exposition import render
from llmd.control.ledger import Ledger, LedgerData
from llmd.observability.totals import Meter
from llmd.wire.messages import HistogramTotals, Totals

KEY = 'llmd_requests_total{endpoint="chat",outcome="stop"}'

#: One step: a worker works, beats, restarts; or control is replaced (keeping what it has written).
steps = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("beat"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("late"), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("control"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_counters_are_exact_and_monotone_across_incarnations_and_controls(walk: list[tuple[str, int, int]]) -> None:
    ledger, meters, incarnations = Ledger(), [Meter() for _ in range(3)], [1, 1, 1]
    told, now_at, seen, expected = Counter[int](), Counter[int](), 0.0, 0.0
    for what, who, amount in walk:
        name = f"frontend-{who}"
        if what == "work":
            meters[who].inc("llmd_requests_total", amount, endpoint="chat", outcome="stop")
            meters[who].observe("llmd_queue_time_seconds", 0.1 * amount)
            now_at[who] += amount
        elif what == "beat":
            ledger.take(name, incarnations[who], meters[who].snapshot())
            expected += now_at[who] - told[who]
            told[who] = now_at[who]
        elif what == "restart":
            meters[who], incarnations[who] = Meter(), incarnations[who] + 1
            now_at[who] = told[who] = 0
        elif what == "late" and incarnations[who] > 1 and name in ledger.data.current and ledger.data.current[name].incarnation == incarnations[who]:
            ledger.take(name, incarnations[who] - 1, Totals({KEY: float(amount)}))
        elif what == "control":
            ledger = Ledger(msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.data), type=LedgerData))
        value = ledger.counters().get(KEY, 0.0)
        assert value >= seen
        seen = value
    assert seen == expected


def test_histograms_add_up_over_workers_and_incarnations() -> None:
    ledger = Ledger()
    for worker, incarnation, times in (("a", 1, 2), ("a", 2, 1), ("b", 1, 4)):
        meter = Meter()
        for _ in range(times):
            meter.observe("llmd_queue_time_seconds", 0.02)
        ledger.take(worker, incarnation, meter.snapshot())
    histogram = ledger.histograms()["llmd_queue_time_seconds"]
    assert histogram.counts[-1] == 7
    assert math.isclose(histogram.sum, 0.14)


def test_values_that_cannot_be_are_ignored() -> None:
    ledger = Ledger()
    ledger.take("a", 1, Totals({"good_total": 5.0}))
    bad = {"good_total": 3.0, "nan_total": math.nan, "inf_total": math.inf, "negative_total": -1.0, 'evil{x="\n"} 1\nforged': 1.0, "": 1.0}
    broken = {"h": HistogramTotals((1.0,), (5, 2), 1.0), "h2": HistogramTotals((1.0,), (1,), 1.0), "h3": HistogramTotals((1.0,), (1, 1), math.nan)}
    ledger.take("a", 1, Totals(bad, {}, broken))
    assert ledger.counters() == {"good_total": 5.0}
    assert ledger.histograms() == {}


def test_the_exposition_parses_and_has_help_and_type() -> None:
    meter = Meter()
    meter.inc("llmd_requests_total", endpoint="chat", outcome="stop")
    meter.inc("llmd_requests_total", endpoint="completions", outcome="length")
    meter.observe("llmd_scheduler_step_seconds", 0.2, phase="decode")
    meter.inc("unheard_of_total")
    totals = meter.snapshot()
    text = render({"llmd_requests_running": 2.0, 'llmd_kv_pages{state="free"}': 1.5}, totals.counters, totals.histograms)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["llmd_requests"].type == "counter"
    assert len(families["llmd_requests"].samples) == 2
    steps_family = families["llmd_scheduler_step_seconds"]
    assert steps_family.type == "histogram"
    inf = next(s for s in steps_family.samples if s.labels.get("le") == "+Inf")
    assert (inf.value, inf.labels["phase"]) == (1.0, "decode")
    assert families["llmd_requests_running"].documentation == CATALOG["llmd_requests_running"][1]
    assert families["llmd_kv_pages"].samples[0].value == 1.5
    assert "unheard_of" in families
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
