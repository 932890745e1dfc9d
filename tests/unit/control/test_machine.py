"""The state machine: every state can be reached, what is not in the table raises, each transition is an event."""

from __future__ import annotations

import itertools

import pytest

from llmd.control.machine import BEFORE_READY, RESUMABLE, STATES, TRANSITIONS, Change, IllegalTransition, Machine, State

EVENTS = sorted({row.event for row in TRANSITIONS})
LEGAL = {(row.event, source): row.target for row in TRANSITIONS for source in row.sources}


def machine(state: State = "starting") -> tuple[Machine, list[Change]]:
    changes: list[Change] = []
    return Machine(changes.append, state), changes


def test_every_state_is_reachable_from_starting() -> None:
    reached = {"starting"}
    while more := {row.target for row in TRANSITIONS if row.sources & reached} - reached:
        reached |= more
    assert reached == set(STATES)


def test_a_start_to_ready_and_through_a_crash() -> None:
    it, changes = machine()
    for event in ("load", "loaded", "warm", "engine_lost", "engine_back", "drain", "resume", "drain", "stop"):
        it.fire(event, f"because of {event}")
    assert [c.target for c in changes] == ["loading", "warming", "ready", "recovering", "ready", "draining", "ready", "draining", "stopping"]
    assert [c.seq for c in changes] == list(range(1, 10))
    assert it.reason == "because of stop"


@pytest.mark.parametrize(("event", "state"), [pair for pair in itertools.product(EVENTS, STATES) if pair not in LEGAL])
def test_an_illegal_transition_raises_and_changes_nothing(event: str, state: State) -> None:
    it, changes = machine(state)
    assert not it.can(event)
    with pytest.raises(IllegalTransition):
        it.fire(event)
    assert (it.state, changes) == (state, [])


def test_an_unknown_event_raises() -> None:
    it, _ = machine()
    with pytest.raises(IllegalTransition):
        it.fire("dance")


def test_one_event_leads_to_one_place() -> None:
    pairs = [(row.event, source) for row in TRANSITIONS for source in row.sources]
    assert len(pairs) == len(set(pairs))


def test_the_daemon_can_stop_and_fail_from_wherever_it_works() -> None:
    for state in STATES:
        assert machine(state)[0].can("stop") == (state != "stopping")
        assert machine(state)[0].can("fail") == (state != "failed")
    assert not BEFORE_READY & RESUMABLE
