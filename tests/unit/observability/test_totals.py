"""Totals of a process: what a heartbeat takes of its meter."""

from __future__ import annotations

from llmd.observability.totals import Meter


def test_a_histogram_is_made_anew_when_something_was_put_in_and_not_before() -> None:
    meter = Meter()
    histogram = meter.histogram("x", (1.0, 2.0))
    empty = meter.snapshot().histograms["x"]
    assert (empty.counts, empty.sum) == ((0, 0, 0), 0.0)
    assert meter.snapshot().histograms["x"] is empty
    histogram.observe(0.0)  # which leaves the sum as it is
    one = meter.snapshot().histograms["x"]
    assert one.counts == (1, 1, 1)
    histogram.observe(1.5)
    histogram.observe(9.0)
    assert (meter.snapshot().histograms["x"].counts, meter.snapshot().histograms["x"].sum) == ((1, 2, 3), 10.5)
    assert one.counts == (1, 1, 1) and empty.counts == (0, 0, 0), "what was told stays as it was"
