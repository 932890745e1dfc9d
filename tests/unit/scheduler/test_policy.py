"""Who is next, who makes way, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from llmd.scheduler import policy
from llmd.wire.messages import AbortReq
from tests.unit.scheduler.harness import Bench, oracle


def admitted(bench: Bench) -> list[str]:
    """Runs to the end; rids in the order in which they first ran, those of before left out."""
    before, order = set(bench.out.first), dict[str, None]()
    while bench.turn() or bench.scheduler.in_flight or bench.source.queue:
        order |= dict.fromkeys((*bench.scheduler.decode.running, *bench.out.first))
    return [rid for rid in order if rid not in before]


def test_the_urgent_one_runs_at_once_and_who_made_way_loses_nothing() -> None:
    bench = Bench(max_running=4, policy="priority")
    for i in range(24):
        bench.send(f"low{i}", [i, i + 1], 60, priority=10)
    for _ in range(5):
        bench.turn()
    bench.send("urgent", [9, 9, 9], 16, priority=0)
    bench.turn()
    assert "urgent" in bench.scheduler.decode.running
    assert "low3" not in bench.scheduler.decode.running, "of the least urgent the youngest makes way"
    for _ in range(20):
        bench.turn()
    assert bench.out.last["urgent"].finish is not None
    assert "low3" in bench.scheduler.decode.running, "it is next again"
    bench.run()
    for i in range(24):
        assert bench.out.tokens[f"low{i}"] == oracle([i, i + 1], 60)
    assert bench.counter("llmd_requests_preempted_total") == 1


def test_equal_priorities_are_served_in_order_of_arrival_and_never_preempt() -> None:
    bench = Bench(max_running=2, policy="priority")
    for i in range(8):
        bench.send(f"r{i}", [i], 5, priority=3)
    assert admitted(bench) == [f"r{i}" for i in range(8)]
    assert bench.counter("llmd_requests_preempted_total") == 0


def test_smaller_priorities_go_first() -> None:
    bench = Bench(max_running=1, policy="priority")
    for i, priority in enumerate([5, 7, 5, -1, 0]):
        bench.send(f"r{i}", [i], 5, priority=priority)
    assert admitted(bench) == ["r3", "r4", "r0", "r2", "r1"]


def test_who_has_waited_long_enough_goes_next_and_is_not_sent_back() -> None:
    bench = Bench(max_running=1, policy="priority", max_wait=5.0)
    bench.send("running", [1], 30, priority=0)
    bench.turn()
    bench.send("patient", [2], 30, priority=9)
    bench.turn()
    (patient,) = bench.scheduler.waiting
    patient.queued -= 6.0
    bench.scheduler.waiting.pop("patient")
    bench.scheduler.waiting.push(patient)
    bench.send("urgent", [3], 30, priority=-5)
    bench.turn()
    assert bench.scheduler.waiting.head(patient.queued + 6.0) is patient
    assert "running" in bench.scheduler.decode.running
    bench.run()
    assert list(bench.out.first) == ["running", "patient", "urgent"]
    assert bench.counter("llmd_requests_preempted_total") == 0


def test_preemption_makes_room_in_memory_and_not_in_vain() -> None:
    bench = Bench(pages=30, max_running=8, context=120, policy="priority")
    bench.send("low", [1] * 60, 40, priority=5)
    bench.send("middle", [2] * 8, 30, priority=1)
    bench.turn()
    bench.send("large", [3] * 110, 4, priority=2)  # with `low` gone it still lacks what `middle` holds
    for _ in range(4):
        bench.turn()
    assert "low" in bench.scheduler.decode.running
    bench.send("urgent", [4] * 60, 4, priority=0)
    bench.turn()
    assert "urgent" in bench.scheduler.decode.running and "low" not in bench.scheduler.decode.running
    bench.run()
    assert bench.out.tokens["low"] == oracle([1] * 60, 40)


def test_longest_prefix_goes_first_among_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LPM_WINDOW", 4)
    bench = Bench(max_running=1, policy="lpm")
    known = list(range(24))
    bench.send("first", known, 1)
    bench.run()
    bench.send("none", [50] * 24, 2)
    bench.send("some", known[:12] + [50] * 12, 2)
    bench.send("all", [*known, 1], 2)
    bench.send("equal", [60] * 24, 2)
    bench.send("late", [*known, 2, 3, 4, 5], 2)
    assert admitted(bench) == ["all", "late", "some", "none", "equal"]


def test_lpm_starves_nobody() -> None:
    bench = Bench(max_running=1, policy="lpm", max_wait=5.0)
    known = list(range(24))
    bench.send("first", known, 1)
    bench.run()
    bench.send("unknown", [50] * 24, 2)
    bench.send("known", known, 2)
    bench.scheduler.receive(lambda command: None)
    next(iter(bench.scheduler.waiting)).queued -= 6.0
    assert admitted(bench) == ["unknown", "known"]


def test_a_queued_request_that_is_aborted_leaves_nothing_and_its_rid_may_come_again() -> None:
    for kind in ("fcfs", "lpm", "priority"):
        bench = Bench(max_running=1, policy=kind)  # type: ignore[arg-type]
        bench.send("busy", [1], 40)
        bench.turn()
        bench.send("x", [2], 3)
        bench.turn()
        bench.source.queue.append(AbortReq(rid="x", epoch=1))
        bench.send("x", [3], 3)
        bench.run()
        assert bench.out.tokens["x"] == oracle([3], 3)
        assert bench.scheduler.in_flight == 0


def test_the_heaps_forget_who_has_left() -> None:
    queue = policy.PriorityQueue(1e9)
    bench = Bench(policy="priority")
    for i in range(500):
        bench.send(f"r{i}", [1], 1)
    bench.scheduler.receive(lambda command: None)
    for req in list(bench.scheduler.waiting):
        queue.push(req)
        assert queue.head(0.0) is req
        queue.pop(req.rid)
    assert queue.head(0.0) is None and not queue._by_wait and not queue._by_priority
