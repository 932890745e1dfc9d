"""When is what restarted: a pure function of (unit, its state, history, the world, now, chance). It holds no clock and calls nothing.

A *unit* restarts as a whole: all ranks of the engine together, every other process alone. A *budget* belongs to a role
group: `max` restarts within `window`; the first is immediate, then the wait doubles up to a limit, with 20 % jitter.
Stop beats restart: once a stop has begun nothing is spawned, save, while a drain still owes tokens, what control asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from llmd.config.server_args import RestartArgs
from llmd.plan.spec import Group, ProcessSpec

#: `up`: control is about to tell that llmd is ready; who dies from then on is replaced.
Mode = Literal["starting", "up", "running", "draining", "stopping"]
NEVER = math.inf
JITTER = 0.2


class Unit(Struct, frozen=True):
    """What restarts together."""

    name: str
    group: Group
    members: tuple[str, ...]


class UnitState(Struct, frozen=True):
    """Where a unit stands."""

    up: bool = False
    """Spawned: from here on a member that is gone has died."""
    due: float = 0.0
    """Monotonic time before which a unit that is down is not spawned."""
    held: bool = False
    """An operator stopped it; only an operator starts it again."""
    asked: bool = False
    """control asked for it, so a drain does not forbid it."""


class World(Struct, frozen=True):
    """What a decision depends on beyond the unit itself."""

    mode: Mode
    alive: frozenset[str]
    """Names of processes that have a pid."""
    owed: bool = False
    """Requests are in flight, as far as control said."""
    pardoned: frozenset[str] = frozenset()
    """Processes whose death before the first READY does not end the start."""
    excused: frozenset[str] = frozenset()
    """Processes that died of a request which is being found out: such a death is not counted, and there are few of them."""


class Spawn(Struct, frozen=True):
    """Start all members."""

    members: tuple[str, ...]


class Kill(Struct, frozen=True):
    """SIGKILL these members."""

    members: tuple[str, ...]


class EndStart(Struct, frozen=True):
    """`member` died before the first READY: the start has failed."""

    member: str


class GiveUp(Struct, frozen=True):
    """`member` died once more than the budget allows."""

    member: str


Action = Spawn | Kill | EndStart | GiveUp


class Outcome(Struct, frozen=True):
    """New state of the unit, new history of its group, and what to do."""

    state: UnitState
    history: tuple[float, ...]
    actions: tuple[Action, ...] = ()


def units_of(specs: Iterable[ProcessSpec]) -> tuple[Unit, ...]:
    """The engine's ranks are one unit, every other process is one of its own. In the order of the plan."""
    members: dict[str, list[ProcessSpec]] = {}
    for spec in specs:
        members.setdefault("engine" if spec.group == "engine" else spec.name, []).append(spec)
    return tuple(Unit(name, group[0].group, tuple(s.name for s in group)) for name, group in members.items())


def step(unit: Unit, state: UnitState, history: tuple[float, ...], budget: RestartArgs, world: World, now: float, chance: Callable[[], float]) -> Outcome:
    """One look at one unit. `history`: times of the group's counted restarts."""
    if state.up:
        return _watch(unit, state, history, budget, world, now, chance)
    if _may_spawn(unit, state, world, now):
        return Outcome(UnitState(up=True), history, (Spawn(unit.members),))
    return Outcome(state, history)


def ask(unit: Unit, world: World, now: float) -> tuple[UnitState, tuple[Action, ...]]:
    """Restart a unit that has not failed, not counted in the budget. Not to be called once `stopping`."""
    return UnitState(due=now, asked=True), _kill_rest(unit, world)


def hold(unit: Unit, world: World) -> UnitState:
    """An operator stops the unit: a pending restart is cancelled."""
    return UnitState(due=NEVER, held=True)


def recent(budget: RestartArgs, history: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The restarts of a group that count against its budget at `now`."""
    return tuple(at for at in history if now - at < budget.window)


def wait(budget: RestartArgs, history: tuple[float, ...], now: float, chance: Callable[[], float]) -> tuple[float | None, tuple[float, ...]]:
    """After one more failure: (seconds to wait, new history); None instead of seconds when the budget is spent."""
    lately = recent(budget, history, now)
    if len(lately) >= budget.max:
        return None, lately
    first, second, most = budget.backoff
    # Bounded exponent: doubling 1 s more than 40 times means nothing and would overflow in the end.
    seconds = first if not lately else min(second * 2.0 ** min(len(lately) - 1, 40), most)
    return seconds * (1 - JITTER + 2 * JITTER * chance()), (*lately, now)


def _watch(unit: Unit, state: UnitState, history: tuple[float, ...], budget: RestartArgs, world: World, now: float, chance: Callable[[], float]) -> Outcome:
    dead = [name for name in unit.members if name not in world.alive]
    if not dead:
        return Outcome(state, history)
    rest = _kill_rest(unit, world)
    if world.mode == "stopping":
        return Outcome(UnitState(due=NEVER), history)
    if world.mode == "starting" and not world.pardoned.issuperset(dead):
        return Outcome(UnitState(due=NEVER), history, (EndStart(dead[0]),))
    if world.mode == "draining" and not _owed_control(unit, world):
        return Outcome(UnitState(due=NEVER), history, rest)
    if world.excused.issuperset(dead):
        return Outcome(UnitState(due=now), history, rest)
    seconds, history = wait(budget, history, now, chance)
    if seconds is None:
        return Outcome(UnitState(due=NEVER), history, (GiveUp(dead[0]),))
    return Outcome(UnitState(due=now + seconds), history, rest)


def _may_spawn(unit: Unit, state: UnitState, world: World, now: float) -> bool:
    if state.held or now < state.due or world.mode == "stopping" or any(name in world.alive for name in unit.members):
        return False
    return world.mode != "draining" or state.asked or _owed_control(unit, world)


def _owed_control(unit: Unit, world: World) -> bool:
    """control comes back in a drain while requests are in flight, for it alone knows when they have ended."""
    return unit.group == "control" and world.owed


def _kill_rest(unit: Unit, world: World) -> tuple[Action, ...]:
    alive = tuple(name for name in unit.members if name in world.alive)
    return (Kill(alive),) if alive else ()
