"""What the admin plane shows comes from the last heartbeats: whole, joined, and there while a rank says nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from llmd.wire.tables import OwnedRequest, Prefix, ScheduledRequest, Tables
from tests.daemon import SLOW
from tests.integration.control.harness import FakeWorker, Stage, stage, wait_for

Trio = tuple[Stage, FakeWorker, FakeWorker]


@pytest.fixture
def daemon() -> Iterator[Trio]:
    """A ready daemon, its scheduler and its frontend."""
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        made.start_control()
        scheduler, _, frontend = made.to_ready()
        yield made, scheduler, frontend


def owned(rid: str, age: float, **fields: object) -> OwnedRequest:
    facts = {"client_id": "", "prompt_tokens": 40, "output_tokens": 0, "max_new_tokens": 100, "first_token_s": 0.0, "silent_s": 0.0, "streamed": True}
    return OwnedRequest(rid=rid, request=rid, age_s=age, **{**facts, **fields})  # type: ignore[arg-type]


def scheduled(rid: str, phase: str, pages: int = 0) -> ScheduledRequest:
    return ScheduledRequest(rid, 0, phase, 5.0, 0.5, 40, 16, 10, pages, 3)  # type: ignore[arg-type]


def test_requests_join_what_frontends_and_ranks_know(daemon: Trio) -> None:
    made, scheduler, frontend = daemon
    rows = [owned("a", 20.0, client_id="job-7", output_tokens=30, first_token_s=10.0, silent_s=0.1), owned("b", 9.0)]
    frontend.tables = Tables(owned=rows, requests_total=2)
    scheduler.tables = Tables(scheduled=[scheduled("a", "decode", 5), scheduled("c", "waiting")], requests_total=2)
    wait_for(lambda: made.http.get("/v1/requests").json()["total"] == 3, "the rows are there")
    found = {row["rid"]: row for row in made.http.get("/v1/requests").json()["requests"]}
    assert list(found) == ["a", "b", "c"], "oldest first"
    a, b, c = found.values()
    assert (a["client_id"], a["phase"], a["pages"], a["priority"], a["rank"], a["frontend"]) == ("job-7", "decode", 5, 3, 0, 0)
    assert 20 <= a["age_s"] < 20 + 5 * SLOW and a["tokens_s"] == pytest.approx(30 / (a["age_s"] - 10), abs=0.05)
    assert (b["phase"], b["tokens_s"], b["pages"], b["client_id"]) == ("submitted", 0.0, 0, None)
    assert (c["phase"], c["frontend"], c["output_tokens"]) == ("waiting", 0, 10)
    assert a.keys() == b.keys() == c.keys()
    made.supervisor.died("scheduler-0")
    made.wait_state("recovering")
    held = {row["rid"]: row["phase"] for row in made.http.get("/v1/requests").json()["requests"]}
    assert held == {"a": "held", "b": "held"}, "a dead rank's rows go with it"
    frontend.meter.set("llmd_requests_held", 3)
    wait_for(lambda: made.status()["requests"]["held"] == 5, "two that had begun, and three that have come since")
    assert made.status()["requests"]["running"] == 0
    wait_for(lambda: made.supervisor.reports[-1]["status"].endswith("; 5 held"), "systemd hears of it")


def test_kv_shows_prefixes_holders_and_the_hit_rate(daemon: Trio) -> None:
    made, scheduler, _ = daemon
    assert made.http.get("/v1/kv").json()["prefix_cache"] == {"queried_tokens": 0, "hit_tokens": 0, "hit_rate": None}
    scheduler.meter.inc("llmd_prefix_cache_hit_tokens_total", 100)
    small, big = Prefix("0a", 32, 16, 1, 0, 2, 0), Prefix("0b", 0, 512, 32, 1, 9, 1)
    scheduler.tables = Tables(scheduled=[scheduled("a", "decode", 5), scheduled("w", "waiting")], prefixes=[small, big], prefixes_total=7)
    scheduler.meter.inc("llmd_prefix_cache_queried_tokens_total", 400)
    wait_for(lambda: made.http.get("/v1/kv").json()["prefix_cache"]["hit_rate"] is not None, "the counters are there")
    kv = made.http.get("/v1/kv").json()
    assert [(p["name"], p["pages"], p["below"], p["users"]) for p in kv["prefixes"]] == [("0b", 32, 1, 1), ("0a", 1, 0, 0)]
    (holder,) = kv["holders"]
    assert (holder["rid"], holder["pages"], holder["cached_tokens"], holder["rank"]) == ("a", 5, 16, 0)
    assert (kv["retracted"], kv["prefixes_total"]) == (0, 7)
    assert (kv["pages_total"], kv["tokens_total"], kv["prefix_cache"]["hit_rate"]) == (100, 1600, 0.25)
    assert set(made.status()["kv"]) == {"page_size", "pages_total", "pages_free", "pages_active", "pages_cached"}


def test_config_shows_values_origins_and_no_secret(daemon: Trio) -> None:
    made, _, _ = daemon
    answer = made.http.get("/v1/config").json()
    rows = {row["key"]: row for row in answer["values"]}
    assert rows["http.drain_timeout"] == {
        "key": "http.drain_timeout", "value": 2.0, "text": "2s", "origin": "caller", "resolved": False, "reload": "live",
    }  # fmt: skip
    assert answer["config_file"] is None


def test_history_has_samples_from_the_first_heartbeat_on(daemon: Trio) -> None:
    made, _, _ = daemon
    history = made.http.get("/v1/history").json()
    assert history["every_s"] == 5 and history["span_s"] == 900
    assert 0 <= history["samples"][-1]["age_s"] < 60
    made.supervisor.died("scheduler-0")
    made.wait_state("recovering")
    wait_for(lambda: made.http.get("/v1/history").json()["samples"][-1]["kv_used"] is None, "a sample without an engine", 30)


def test_answers_bear_the_time_at_which_they_are_made(daemon: Trio) -> None:
    made = daemon[0]
    first = parsedate_to_datetime(made.http.get("/v1/status").headers["date"])
    assert abs(time.time() - first.timestamp()) < 5 * SLOW
    time.sleep(1.1)
    assert parsedate_to_datetime(made.http.get("/v1/status").headers["date"]) > first
