"""Who gets which signal when."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from llmd.config.server_args import ServerArgs
from llmd.plan.ports import PortArgs
from llmd.plan.spec import make_plan
from llmd.supervisor.shutdown import StopSequence

SPECS = make_plan(ServerArgs(), PortArgs("/run/llmd"), threads=1)
ALL = {spec.name for spec in SPECS}
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def sequence(*, quick: bool, timeout: float = 10.0) -> StopSequence:
    return StopSequence(SPECS, status=0, why="test", quick=quick, now=100.0, timeout=timeout)


def test_in_order_each_level_when_the_one_before_is_gone() -> None:
    stop, alive, sent = sequence(quick=False), set(ALL), []
    while alive:
        step = stop.step(alive, 101.0)
        sent.append(step)
        assert stop.step(alive, 101.0) == []
        alive -= {name for name, _ in step}
    assert sent == [[("frontend-0", TERM)], [("scheduler-0", TERM)], [("detokenizer-0", TERM)], [("control-0", TERM)]]


def test_at_the_deadline_all_are_killed_whatever_their_turn() -> None:
    stop = sequence(quick=False)
    stop.step(ALL, 101.0)
    assert stop.step(ALL, 110.0) == [(name, KILL) for name in sorted(ALL)]


def test_at_once_only_frontends_have_last_words() -> None:
    stop = sequence(quick=True)
    assert dict(stop.step(ALL, 100.0)) == {"frontend-0": TERM, "scheduler-0": KILL, "detokenizer-0": KILL, "control-0": KILL}
    assert stop.step({"frontend-0"}, 100.9) == []
    assert stop.step({"frontend-0"}, 101.0) == [("frontend-0", KILL)]


@given(st.booleans(), st.lists(st.tuples(st.floats(0, 20), st.sets(st.sampled_from(sorted(ALL)))), max_size=10))
def test_no_signal_is_sent_twice_nor_to_the_dead(quick: bool, looks: list[tuple[float, set[str]]]) -> None:
    stop, seen = sequence(quick=quick), set()
    for after, alive in looks:
        for item in stop.step(alive, 100.0 + after):
            assert item not in seen
            assert item[0] in alive
            seen.add(item)
