"""Deaths and restarts: seen at once, with their status, as a group, within a budget, never by supervisord itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon import SLOW, least
from tests.integration.supervisor.harness import Embedded, full, gone, spec, until

Make = Callable[..., Embedded]


#: Nobody waits, however often somebody dies.
AT_ONCE = {"max": 100, "window": 60.0, "backoff": [0.0, 0.0, 0.0]}


def events(one: Embedded, word: str) -> list[dict[str, Any]]:
    return [line for line in one.trace("control-0") if line["what"].startswith("event") and word in line["what"]]


def test_a_death_is_an_event_in_control_at_once_and_carries_the_signal(embedded: Make) -> None:
    one = embedded(full(), restart=AT_ONCE).start()
    one.ready()
    one.wait_started("control-0")
    until("control listens", lambda: events(one, "PROCESS_STATE_RUNNING"))
    assert least(lambda: _heard_of(one), 0.49) < 0.5  # an unmodified supervisord takes 1 to 2 s


def _heard_of(one: Embedded) -> float:
    """Kill the scheduler: seconds until control knows."""
    pid = until("a scheduler", lambda: one.pid("scheduler-0"))
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    event = until("the event", lambda: events(one, f"pid:{pid} status:-9"))[0]
    assert "PROCESS_STATE_EXITED" in event["what"]
    last = until("the new one", lambda: one.pid("scheduler-0") not in (0, pid) and one.child("scheduler-0"))["last_exit"]
    assert (last["status"], last["reason"]) == (-9, "signal")
    return float(event["at"]) - killed


def test_one_rank_dies_and_the_engine_restarts_as_one_with_a_new_epoch(embedded: Make) -> None:
    ranks = [spec("scheduler", "work", rank=rank) for rank in range(3)]
    one = embedded([*full()[:3], *ranks]).start()
    one.ready()
    before = {name: one.pid(name) for name in one.names}
    killed = time.monotonic()
    os.kill(before["scheduler-1"], signal.SIGKILL)
    schedulers = [f"scheduler-{rank}" for rank in range(3)]
    until("three new ranks", lambda: all(one.pid(name) not in (0, before[name]) for name in schedulers))
    assert time.monotonic() - killed < 5 * SLOW
    after = one.snapshot()
    assert after["epoch"] == 2
    reasons = {p["name"]: p["last_exit"]["reason"] for p in after["processes"] if p["name"] in schedulers}
    assert reasons == {"scheduler-0": "reload", "scheduler-1": "signal", "scheduler-2": "reload"}
    assert {name: one.pid(name) for name in one.names[:3]} == {name: before[name] for name in one.names[:3]}


@pytest.mark.parametrize("role", ["control", "frontend", "detokenizer"])
def test_any_other_process_restarts_alone(embedded: Make, role: str) -> None:
    one = embedded(full()).start()
    one.ready()
    before = {name: one.pid(name) for name in one.names}
    os.kill(before[f"{role}-0"], signal.SIGKILL)
    until("the new one", lambda: one.pid(f"{role}-0") not in (0, before[f"{role}-0"]))
    after = one.snapshot()
    assert after["epoch"] == 1
    assert [p["name"] for p in after["processes"] if p["pid"] != before[p["name"]]] == [f"{role}-0"]
    assert one.child(f"{role}-0")["incarnation"] == 2


def test_the_first_restart_is_immediate_the_second_waits_and_the_wait_is_shown(embedded: Make) -> None:
    one = embedded(full(), restart={"max": 5, "window": 60.0, "backoff": [0.0, 1.5, 30.0]}).start()
    one.ready()
    for _ in range(2):
        pid = one.pid("detokenizer-0")
        died = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until("it is back", lambda: one.pid("detokenizer-0") not in (0, pid))  # noqa: B023
        took = time.monotonic() - died
    assert 1.1 < took < 5 * SLOW
    other = embedded(full(), restart={"max": 5, "window": 60.0, "backoff": [600.0, 600.0, 600.0]}).start()
    other.ready()
    os.kill(other.pid("detokenizer-0"), signal.SIGKILL)
    seen = until("it waits", lambda: (child := other.child("detokenizer-0"))["state"] == "backoff" and child)
    assert 0 < seen["backoff_s"] <= 720


def test_a_spent_budget_ends_with_70_and_the_last_words_of_the_dead(embedded: Make) -> None:
    one = embedded(full(), restart={"max": 0, "window": 60.0, "backoff": [0.0, 1.0, 30.0]}).start()
    one.ready()
    one.wait_started("scheduler-0")
    os.kill(one.pid("scheduler-0"), signal.SIGKILL)
    assert one.wait() == 70
    assert "giving up: more than 0 restarts of engine" in one.log()
    assert "scheduler-0 ended with signal 9 (SIGKILL)" in one.log()


def test_children_that_die_at_once_do_not_spin(embedded: Make) -> None:
    one = embedded(full(detokenizer="later 3"), restart={"max": 3, "window": 60.0, "backoff": [0.0, 0.2, 30.0]}).start()
    one.ready()
    one.wait_started("detokenizer-0")
    os.kill(one.pid("detokenizer-0"), signal.SIGKILL)
    assert one.wait() == 70
    assert one.started("detokenizer-0") == 4
    assert "detokenizer-0: one last word" in one.log()


@pytest.mark.parametrize(("own", "ends"), [(78, 78), (71, 71), (3, 70), (0, 70)])
def test_a_death_before_the_first_ready_ends_the_start(embedded: Make, own: int, ends: int) -> None:
    one = embedded(full(scheduler=f"fail {own}", frontend="serve", detokenizer="stubborn"), stop_timeout=600.0).start(up=False)
    assert one.wait() == ends, "nobody waits for the stubborn one"
    assert f"llmd could not start: scheduler-0 ended with status {own}" in one.log()
    assert "scheduler-0: one last word" in one.log()
    assert all(gone(line["pid"]) for line in one.trace())
    assert one.started("scheduler-0") == 1


def test_a_program_that_cannot_be_executed_ends_the_start(embedded: Make) -> None:
    broken = {**spec("scheduler", "work"), "argv": ["/nonexistent/python"]}
    one = embedded([*full()[:3], broken]).start(up=False)
    assert one.wait() == 70
    assert "scheduler-0 could not be started" in one.log()


def test_control_may_restart_the_engine_and_that_is_not_counted(embedded: Make) -> None:
    one = embedded(full(), restart={"max": 0, "window": 60.0, "backoff": [0.0, 1.0, 30.0]}).start()
    one.ready()
    before = one.pid("scheduler-0")
    assert one.call("restartEngine", reason="reload") == {"ok": True, "message": "", "epoch": 1}, "the epoch that this ends"
    until("the new one", lambda: one.pid("scheduler-0") not in (0, before))
    assert one.snapshot()["epoch"] == 2
    assert one.child("scheduler-0")["last_exit"]["reason"] == "reload"


def test_a_hung_child_dumps_its_stacks_and_is_replaced(embedded: Make) -> None:
    one = embedded(full(scheduler="dumps")).start()
    one.ready()
    one.wait_started("scheduler-0")
    pid = one.pid("scheduler-0")
    assert one.call("kill", name="scheduler-0", pid=pid + 1, reason="hang")["ok"] is False
    assert one.call("kill", name="scheduler-0", pid=pid, reason="hang")["ok"] is True
    until("the new one", lambda: one.pid("scheduler-0") not in (0, pid))
    last = one.child("scheduler-0")["last_exit"]
    assert last["reason"] == "hang"
    assert "stack of a hung child" in last["stderr"]


def test_a_stopped_child_is_killed_too(embedded: Make) -> None:
    one = embedded(full()).start()
    one.ready()
    pid = one.pid("frontend-0")
    os.kill(pid, signal.SIGSTOP)
    assert one.call("kill", name="frontend-0", pid=pid, reason="hang")["ok"] is True
    until("the new one", lambda: one.pid("frontend-0") not in (0, pid))


def test_a_silent_control_is_replaced_while_a_dead_rank_is_healed(embedded: Make) -> None:
    one = embedded(full(), control_timeout=0.6 * SLOW).start()
    one.ready()
    one.wait_started("control-0")
    one.wait_started("scheduler-0")
    control, scheduler = (until("it runs", lambda name=name: one.pid(name)) for name in ("control-0", "scheduler-0"))
    os.kill(control, signal.SIGSTOP)
    os.kill(scheduler, signal.SIGKILL)
    one.wait_started("scheduler-0", 2)
    one.wait_started("control-0", 2, timeout=8)
    assert one.child("control-0")["last_exit"]["reason"] == "hang"


def test_what_a_dead_child_leaves_in_its_group_is_killed(embedded: Make) -> None:
    one = embedded(full(scheduler="family")).start()
    one.ready()
    one.wait_started("scheduler-0")
    grandchild = int(next(line["what"].split()[1] for line in one.trace("scheduler-0") if line["what"].startswith("grandchild")))
    os.kill(one.pid("scheduler-0"), signal.SIGKILL)
    until("the grandchild is gone", lambda: gone(grandchild))


def test_all_events_of_a_large_restart_reach_a_busy_control(embedded: Make) -> None:
    ranks = [spec("scheduler", "work", rank=rank) for rank in range(6)]
    one = embedded([*full()[:3], *ranks]).start()
    one.ready()
    one.wait_started("control-0")
    os.kill(one.pid("control-0"), signal.SIGSTOP)
    for _ in range(3):
        epoch = one.snapshot()["epoch"]
        assert one.call("restartEngine", reason="test")["ok"]
        until("the next epoch", lambda: one.snapshot()["epoch"] > epoch and one.pid("scheduler-5"))  # noqa: B023
    os.kill(one.pid("control-0"), signal.SIGCONT)
    until("18 exits", lambda: len(events(one, "EXITED")) >= 18)


def test_a_new_control_gets_events_at_once(embedded: Make) -> None:
    one = embedded(full(), restart=AT_ONCE).start()
    one.ready()
    one.wait_started("control-0")
    os.kill(one.pid("control-0"), signal.SIGKILL)
    one.wait_started("control-0", 2)
    new = one.pid("control-0")

    def heard_of() -> float:
        pid = until("a detokenizer", lambda: one.pid("detokenizer-0"))
        died = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        event = until("the event", lambda: [e for e in events(one, f"pid:{pid} status:-9") if e["pid"] == new])[0]
        return float(event["at"]) - died

    assert least(heard_of, 0.89) < 0.9
