"""The numbers of the dashboard: percentiles of what a histogram counted lately, charts of the last minutes, CPU shares."""

from __future__ import annotations

from typing import Any

import pytest

from llmctl import exits
from llmctl.exits import CtlError
from llmctl.top.feed import Feed
from llmctl.top.history import History
from llmctl.top.metrics import Recent, labelled, parse, quantile
from tests.unit.llmctl.fake_daemon import ABSENT, CPU, FakeDaemon, feed_of


def test_an_exposition_is_read_and_what_is_none_left_out() -> None:
    values = parse('# HELP a b\n# TYPE a counter\na{role="x",rank="0"} 3\nb 1.5e3\nodd line\n\nc NaN')
    assert values['a{role="x",rank="0"}'] == 3 and values["b"] == 1500 and "odd" not in values
    assert list(labelled(values, "a")) == [({"role": "x", "rank": "0"}, 3.0)]


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.625), (0.9, 2.0), (0.99, 2.0)])
def test_quantiles_are_those_of_prometheus(share: float, expected: float) -> None:
    """10 observations up to 1 s, 8 more up to 2 s, 2 above: linear within a bucket, the last bound for what is above all."""
    assert quantile(share, ((1.0, 10.0), (2.0, 18.0), (float("inf"), 20.0))) == pytest.approx(expected)


def test_without_observations_there_is_no_quantile() -> None:
    assert quantile(0.5, ()) is None and quantile(0.5, ((1.0, 0.0), (float("inf"), 0.0))) is None


def test_only_the_last_minute_counts_and_a_new_daemon_starts_anew() -> None:
    def counted(fast: float, slow: float) -> dict[str, float]:
        return {'h_bucket{le="1.0"}': fast, 'h_bucket{le="10.0"}': fast + slow, 'h_bucket{le="+Inf"}': fast + slow}

    recent = Recent("h")
    recent.take(counted(0, 100), 0)
    assert recent.quantile(0.5) is None and recent.since_start(0.5) == pytest.approx(5.5)
    recent.take(counted(0, 200), 30)
    assert recent.quantile(0.5) == pytest.approx(5.5)
    recent.take(counted(100, 200), 100)
    recent.take(counted(200, 200), 130)
    assert recent.quantile(0.5) == pytest.approx(0.5), "the slow ones are more than a minute old"
    recent.take(counted(1, 0), 131)
    assert recent.quantile(0.5) is None


def test_a_chart_shows_the_time_that_there_is_and_gaps_stay_gaps() -> None:
    history = History()
    for second in range(60):
        history.take(float(second), {"x": 1.0 if second < 30 else 3.0})
    columns = history.columns("x", 120, 59.0)
    assert history.window(59.0) == 120 and columns[:60] == [None] * 60
    assert columns[60] == 1.0 and columns[-1] == 3.0
    history.take(120.0, {"x": 5.0})
    columns = history.columns("x", 60, 120.0)
    assert columns[-1] == 5.0 and columns[-10] is None, "nobody was there for a minute"
    assert history.peak("x") == 5.0 and history.peak("y") is None
    history.take(1100.0, {"x": 2.0})
    assert history.peak("x") == 2.0, "only a quarter of an hour is kept"


def test_cpu_shares_are_those_of_the_last_seconds() -> None:
    shares = feed_of(FakeDaemon(), seconds=1).picture.cpu
    assert shares == {f"{role}-0": pytest.approx(share) for role, share in CPU.items()}


def recalled(age: float, **fields: float | None) -> dict[str, Any]:
    known = dict.fromkeys(("generation_tokens_s", "prompt_tokens_s", "running", "waiting", "kv_used", "first_token_s", "between_tokens_s"))
    return {"age_s": age, **known, **fields}


def test_a_new_dashboard_begins_with_what_the_daemon_remembers() -> None:
    daemon = FakeDaemon()
    daemon.history = [recalled(5.0 * step, generation_tokens_s=100.0, kv_used=0.5, first_token_s=0.2) for step in range(180, 0, -1)]
    feed = Feed(daemon, clock=lambda: daemon.now)
    feed.poll()
    columns = feed.history.columns("out", 90, daemon.now)
    assert feed.history.window(daemon.now) == 900 and None not in columns[1:] and columns[1:-1] == [100.0] * 88
    assert feed.history.last("first_token", daemon.now) == 0.2 and feed.history.last("gap", daemon.now) is None


def test_what_was_missed_is_asked_for_and_what_was_seen_is_not_doubled() -> None:
    daemon = FakeDaemon()
    feed = Feed(daemon, clock=lambda: daemon.now)
    for _ in range(5):
        feed.poll()
        daemon.now += 1
    daemon.error = ABSENT
    feed.poll()
    daemon.now += 60
    daemon.error, daemon.history = None, [recalled(5.0 * step, running=7.0) for step in range(13, 0, -1)]
    feed.poll()
    seen = feed.history.columns("running", 120, daemon.now)
    assert None not in seen[-60:] and 7.0 in seen and feed.history.peak("running") == 12, "12 is what was seen before and after"


def test_an_older_daemon_without_a_history_is_watched_all_the_same() -> None:
    class Older(FakeDaemon):
        def get(self, path: str, timeout: float, **query: Any) -> Any:
            if path == "/v1/history":
                raise CtlError(exits.FAILED, "this llmd does not have /v1/history", "", {"error": {}})
            return super().get(path, timeout, **query)

    picture = feed_of(Older(), seconds=1).picture
    assert picture.error is None and picture.at is not None
