"""Stops: in order, at once, after a drain; exit statuses; nothing left, nothing started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.supervisor.harness import Embedded, full, gone, until

Make = Callable[..., Embedded]
ORDER = ["frontend-0", "scheduler-0", "detokenizer-0", "control-0"]


def running(embedded: Make, **settings: object) -> Embedded:
    one = embedded(full(), **settings).start()
    one.ready()
    for name in ORDER:
        one.wait_started(name)
    return one


def terms(one: Embedded) -> list[str]:
    return [line["name"] for line in one.trace() if line["what"] == "term"]


def test_term_wakes_control_and_a_shutdown_stops_in_order(embedded: Make) -> None:
    one = running(embedded)
    one.signal(signal.SIGTERM)
    until("control hears of the drain", lambda: any("drain" in line["what"] for line in one.trace("control-0")))
    snapshot = one.snapshot()
    assert snapshot["stopping"] is True
    assert 0 < snapshot["drain_left_s"] <= 30
    assert all(p["pid"] for p in snapshot["processes"])
    one.call("shutdown", status=0, why="drained")
    assert one.wait() == 0
    assert terms(one) == ORDER


def test_a_second_term_changes_nothing(embedded: Make) -> None:
    one = running(embedded)
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    one.signal(signal.SIGTERM)
    assert all(p["pid"] for p in one.snapshot()["processes"])
    one.call("shutdown", status=0, why="drained")
    assert one.wait() == 0


def test_the_supervisor_ends_a_drain_that_control_does_not_end(embedded: Make) -> None:
    one = running(embedded, drain_timeout=0.2)
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert terms(one) == ORDER
    assert "the drain took too long" in one.log()


def test_term_before_the_first_ready_stops_without_a_drain(embedded: Make) -> None:
    one = embedded(full()).start()
    one.wait_started("control-0")
    one.signal(signal.SIGTERM)
    assert one.wait() == 0


def test_the_first_int_says_what_it_waits_for_the_second_stops_at_once(embedded: Make) -> None:
    one = embedded(full(scheduler="stubborn"), stop_timeout=600.0).start()
    one.ready(requests=3)
    for name in ORDER:
        one.wait_started(name)
    one.signal(signal.SIGINT)
    until("it drains", lambda: "3 running requests may take up to 30 s; interrupt again" in one.log())
    one.signal(signal.SIGINT)
    assert one.wait() == 130
    assert terms(one) == ["frontend-0"]
    assert all(gone(line["pid"]) for line in one.trace())


def test_the_last_words_of_a_stop_at_once_are_bounded(embedded: Make) -> None:
    one = embedded(full(frontend="stubborn", scheduler="stubborn"), stop_timeout=600.0).start()
    one.ready()
    for name in ("frontend-0", "scheduler-0"):
        one.wait_started(name)
    one.signal(signal.SIGINT)
    until("it drains", lambda: one.snapshot()["stopping"])
    asked = time.monotonic()
    one.signal(signal.SIGINT)
    assert one.wait() == 130
    assert time.monotonic() - asked > 0.5


def test_children_that_ignore_term_are_killed_in_time(embedded: Make) -> None:
    one = embedded(full(frontend="stubborn", scheduler="stubborn"), stop_timeout=0.8).start()
    one.ready()
    for name in ORDER:
        one.wait_started(name)
    one.call("shutdown", status=0, why="test")
    assert one.wait() == 0


@pytest.mark.parametrize("status", [70, 71, 78])
def test_control_may_give_up_with_a_status(embedded: Make, status: int) -> None:
    one = running(embedded)
    one.call("giveUp", status=status, why="the engine is lost\nin two lines")
    assert one.wait() == status
    assert "the engine is lost" in one.log()
    assert "in two lines" in one.log()


def test_stop_beats_restart(embedded: Make) -> None:
    """A rank dies in the same instant: no new process appears after the stop began, and the status is 0."""
    for _ in range(5):
        one = running(embedded)
        scheduler = one.pid("scheduler-0")
        one.signal(signal.SIGTERM)
        os.kill(scheduler, signal.SIGKILL)
        until("it drains", lambda: one.snapshot()["stopping"])  # noqa: B023
        one.call("shutdown", status=0, why="nothing in flight")
        assert one.wait() == 0
        assert one.started("scheduler-0") <= 2  # 2 where the death came first
        assert all(gone(line["pid"]) for line in one.trace())


def test_a_stop_cuts_a_back_off_short(embedded: Make) -> None:
    one = running(embedded, restart={"max": 5, "window": 60.0, "backoff": [600.0, 600.0, 600.0]})
    os.kill(one.pid("scheduler-0"), signal.SIGKILL)
    until("it waits", lambda: one.child("scheduler-0")["state"] == "backoff")
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    one.call("shutdown", status=0, why="nothing in flight")
    assert one.wait() == 0
    assert one.started("scheduler-0") == 1


def test_in_a_drain_only_what_control_asks_for_is_started(embedded: Make) -> None:
    one = running(embedded)
    one.report(state="ready", progressing=True, requests=2)
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    os.kill(one.pid("scheduler-0"), signal.SIGKILL)
    until("it is down", lambda: one.child("scheduler-0")["state"] == "exited")
    assert one.call("restartEngine", reason="tokens are owed")["ok"] is True
    one.wait_started("scheduler-0", 2)
    one.call("shutdown", status=0, why="drained")
    assert one.wait() == 0


def test_a_drain_without_control_and_without_requests_ends_at_once(embedded: Make) -> None:
    one = running(embedded)
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    one.report(state="draining", progressing=True, requests=0)
    os.kill(one.pid("control-0"), signal.SIGKILL)
    assert one.wait() == 0
    assert one.started("control-0") == 1


def test_a_control_that_dies_before_it_has_said_what_a_drain_owes_is_replaced(embedded: Make) -> None:
    one = running(embedded)
    one.signal(signal.SIGTERM)
    until("it drains", lambda: one.snapshot()["stopping"])
    os.kill(one.pid("control-0"), signal.SIGKILL)
    one.wait_started("control-0", 2)
    one.call("shutdown", status=0, why="nothing in flight")
    assert one.wait() == 0


def test_all_children_die_with_the_supervisor(embedded: Make) -> None:
    one = embedded(full(scheduler="stubborn", detokenizer="stubborn")).start()
    for name in one.names:
        one.wait_started(name)
    pids = [one.pid(name) for name in one.names]
    one.signal(signal.SIGKILL)
    one.wait()
    until("all children are gone", lambda: all(gone(pid) for pid in pids))


def test_a_stop_right_after_a_start_is_not_lost(embedded: Make) -> None:
    """Between fork and exec a child must not swallow the signal."""
    for _ in range(8):
        one = embedded(full(), stop_timeout=600.0).start(up=False)
        until("the first child", lambda: one.pid("control-0"))  # noqa: B023
        one.signal(signal.SIGTERM)
        assert one.wait() == 0


def test_hangups_are_counted_for_control_and_end_nothing(embedded: Make) -> None:
    one = running(embedded)
    before = [one.pid(name) for name in one.names]
    one.signal(signal.SIGHUP)
    until("control is told", lambda: one.snapshot()["hangups"] == 1)
    assert [one.pid(name) for name in one.names] == before
