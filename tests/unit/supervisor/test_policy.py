"""The restart policy: what the budget allows, what a stop forbids, for any history and any set of living processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmd.config.server_args import RestartArgs, ServerArgs
from llmd.plan.ports import PortArgs
from llmd.plan.spec import make_plan
from llmd.supervisor import policy
from llmd.supervisor.policy import EndStart, GiveUp, Kill, Mode, Outcome, Spawn, Unit, UnitState, World

BUDGET = RestartArgs()
ENGINE = Unit("engine", "engine", ("scheduler-0", "scheduler-1"))
CONTROL = Unit("control-0", "control", ("control-0",))
UP = UnitState(up=True)


def step(unit: Unit, state: UnitState, mode: Mode, alive: set[str], *, history: tuple[float, ...] = (), now: float = 1000.0, **more: Any) -> Outcome:
    return policy.step(unit, state, history, BUDGET, World(mode, frozenset(alive), **more), now, lambda: 0.5)


def test_the_engine_is_one_unit_and_everything_else_alone() -> None:
    specs = make_plan(ServerArgs(), PortArgs("/run/llmd"), threads=1)
    units = policy.units_of(specs)
    assert [unit.name for unit in units] == ["control-0", "frontend-0", "detokenizer-0", "engine"]
    assert sorted(name for unit in units for name in unit.members) == sorted(spec.name for spec in specs)


def test_a_dead_rank_kills_the_others_and_all_come_back_when_all_are_gone() -> None:
    first = step(ENGINE, UP, "running", {"scheduler-1"})
    assert first.actions == (Kill(("scheduler-1",)),)
    assert first.history == (1000.0,)
    assert step(ENGINE, first.state, "running", {"scheduler-1"}).actions == ()
    assert step(ENGINE, first.state, "running", set()).actions == (Spawn(ENGINE.members),)


def test_waits_are_immediate_then_double_to_the_limit() -> None:
    history: tuple[float, ...] = ()
    waits = []
    budget = RestartArgs(max=9, window=1e9)
    for _ in range(9):
        seconds, history = policy.wait(budget, history, 0.0, lambda: 0.5)
        waits.append(seconds)
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.wait(budget, history, 0.0, lambda: 0.5)[0] is None


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_jitter_is_a_fifth(chance: float, failures: int) -> None:
    seconds, _ = policy.wait(RestartArgs(max=10**6), (0.0,) * failures, 0.0, lambda: chance)
    even, _ = policy.wait(RestartArgs(max=10**6), (0.0,) * failures, 0.0, lambda: 0.5)
    assert seconds is not None
    assert even is not None
    assert 0.8 * even <= seconds <= 1.2 * even <= 36.0


@given(st.lists(st.floats(0, 5000), max_size=40), st.integers(0, 6), st.floats(1, 1000))
def test_no_window_ever_holds_more_restarts_than_the_budget(gaps: list[float], most: int, window: float) -> None:
    budget, now, history, restarts = RestartArgs(max=most, window=window), 0.0, (), []
    for gap in gaps:
        now += gap
        seconds, history = policy.wait(budget, history, now, lambda: 0.5)
        if seconds is not None:
            restarts.append(now)
    assert all(sum(at <= other < at + window for other in restarts) <= most for at in restarts)
    assert len(history) <= max(most, 0)


def test_a_group_that_was_healthy_for_the_window_starts_anew() -> None:
    outcome = step(CONTROL, UP, "running", set(), history=(100.0, 200.0, 300.0, 350.0, 399.0), now=1000.0)
    assert outcome.history == (1000.0,)
    assert outcome.state.due == 1000.0


def test_the_budget_ends_in_giving_up() -> None:
    outcome = step(ENGINE, UP, "running", {"scheduler-0"}, history=(900.0,) * 5)
    assert outcome.actions == (GiveUp("scheduler-1"),)


@pytest.mark.parametrize("unit", [ENGINE, CONTROL])
def test_before_the_first_ready_a_death_ends_the_start_unless_it_is_pardoned(unit: Unit) -> None:
    assert step(unit, UP, "starting", set()).actions == (EndStart(unit.members[0]),)
    outcome = step(unit, UP, "starting", set(), pardoned=frozenset(unit.members))
    assert outcome.actions == ()
    assert step(unit, outcome.state, "starting", set()).actions == (Spawn(unit.members),)


states = st.builds(UnitState, up=st.booleans(), due=st.sampled_from([0.0, 999.0, 1001.0, math.inf]), held=st.booleans(), asked=st.booleans())
alive = st.sets(st.sampled_from(["scheduler-0", "scheduler-1", "control-0"]))


@given(st.sampled_from([ENGINE, CONTROL]), states, alive, st.booleans())
def test_stop_beats_restart(unit: Unit, state: UnitState, alive: set[str], owed: bool) -> None:
    assert not any(isinstance(action, Spawn | GiveUp | EndStart) for action in step(unit, state, "stopping", alive, owed=owed).actions)


@given(st.sampled_from([ENGINE, CONTROL]), states, alive, st.booleans())
def test_a_drain_starts_only_what_control_asked_for_or_control_itself(unit: Unit, state: UnitState, alive: set[str], owed: bool) -> None:
    actions = step(unit, state, "draining", alive, owed=owed).actions
    if any(isinstance(action, Spawn) for action in actions):
        assert state.asked or (unit is CONTROL and owed)


@given(st.sampled_from([ENGINE, CONTROL]), states, alive, st.sampled_from(["starting", "running", "draining", "stopping"]), st.booleans())
def test_nothing_is_started_while_a_member_lives_or_an_operator_holds_it(unit: Unit, state: UnitState, alive: set[str], mode: Mode, owed: bool) -> None:
    actions = step(unit, state, mode, alive, owed=owed).actions
    if any(isinstance(action, Spawn) for action in actions):
        assert not state.held
        assert not alive & set(unit.members)
        assert state.due <= 1000.0


@pytest.mark.parametrize("mode", ["running", "draining"])
def test_what_control_asks_for_is_not_counted_and_comes_back(mode: Mode) -> None:
    state, actions = policy.ask(ENGINE, World(mode, frozenset({"scheduler-0", "scheduler-1"})), 1000.0)
    assert actions == (Kill(("scheduler-0", "scheduler-1")),)
    outcome = step(ENGINE, state, mode, set())
    assert outcome == Outcome(UP, (), (Spawn(ENGINE.members),))


def test_a_back_off_is_cut_short_by_a_drain() -> None:
    waiting = step(ENGINE, UP, "running", set(), history=(999.0,)).state
    assert step(ENGINE, waiting, "draining", set(), now=2000.0).actions == ()
