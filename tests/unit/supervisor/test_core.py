"""The supervisor's mind, with hands and a clock of the test's own."""

from __future__ import annotations

import errno
import json
import signal
import time
from typing import Any

import pytest

from llmd.config.server_args import RestartArgs, ServerArgs
from llmd.errors import exhausted
from llmd.plan.context import STACKS_SIGNAL
from llmd.plan.ports import PortArgs
from llmd.plan.spec import make_plan
from llmd.supervisor.core import MAX_GAP_S, Core
from llmd.supervisor.facts import Report, Settings
from llmd.supervisor.notify import Notifier
from llmd.supervisor.os_seam import Os
from llmd.supervisor.rpc import LlmdNamespace
from llmd.supervisor.wakeup import POLL_S

SPECS = make_plan(ServerArgs(), PortArgs("/run/llmd"), threads=1)


class World(Os):
    """Kernel, clock and hands in one: processes are numbers in a table."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pids: dict[str, int] = {}
        self.next_pid = 100
        self.sent: list[tuple[int, int]] = []
        self.told: list[str] = []
        self.readied: list[Report] = []
        self.deaf: set[str] = set()
        self.alone: set[tuple[str, int]] = set()
        self.core: Core

    def monotonic(self) -> float:
        return self.now

    def random(self) -> float:
        return 0.5

    def pid(self, name: str | None = None) -> int:
        return 1 if name is None else self.pids.get(name, 0)

    def state(self, name: str) -> str:
        return "running" if self.pids.get(name) else "exited"

    def spawn(self, name: str) -> None:
        self.core.on_starting(name)
        self.next_pid += 1
        self.pids[name] = self.next_pid

    def terminate(self, name: str) -> None:
        self.sent.append((self.pids[name], signal.SIGTERM))
        if name not in self.deaf:
            self.die(name, 0)

    def tell(self, word: str) -> None:
        self.told.append(word)

    def kill(self, pid: int, sig: int) -> bool:
        self.sent.append((pid, sig))
        return True

    def kill_group(self, pid: int, sig: int) -> bool:
        self.sent.append((pid, sig))
        for name, other in list(self.pids.items()):
            if other == pid:
                self.die(name, -sig)
        return True

    def cpu_s(self) -> float:
        return 0.5

    def rss_bytes(self, pid: int) -> int:
        return 1

    def die(self, name: str, status: int, *, alone: bool = False) -> None:
        if alone:
            self.alone.add((name, self.core.epoch))
        pid = self.pids.pop(name)
        self.core.on_exit(name, pid, status, False)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.core.tick()


@pytest.fixture
def world() -> World:
    return make()


def make(**settings: Any) -> World:
    world = World()
    world.core = Core(
        SPECS,
        Settings(start_id="x", **settings),
        world,
        os_=world,
        notifier=Notifier({}),
        tail=lambda name: [f"last line of {name}"],
        on_ready=world.readied.append,
        on_state=lambda *_: None,
        died_alone=lambda spec, epoch: (spec.name, epoch) in world.alone,
    )
    world.tick()
    return world


def ready(world: World, **more: Any) -> dict[str, Any]:
    return world.core.report(Report(state="ready", progressing=True, ready=True, **more))


def test_all_are_started_at_once_in_the_order_of_the_plan(world: World) -> None:
    assert list(world.pids) == [spec.name for spec in SPECS]
    assert {p["incarnation"] for p in world.core.snapshot()["processes"]} == {1}


def test_a_control_that_reports_lives_and_a_silent_one_is_killed(world: World) -> None:
    pid = world.pids["control-0"]
    for _ in range(20):
        ready(world)
        world.tick(1.0)
    assert world.pids["control-0"] == pid
    for _ in range(7):
        world.tick(1.0)
    assert (pid, STACKS_SIGNAL) in world.sent
    assert (pid, signal.SIGKILL) in world.sent
    assert world.pids["control-0"] != pid


def test_a_supervisor_that_was_stopped_itself_does_not_blame_control(world: World) -> None:
    ready(world)
    pid = world.pids["control-0"]
    world.tick(3600.0)
    assert world.pids["control-0"] == pid
    assert not world.sent


def test_the_longest_poll_counts_whole_as_silence_of_control() -> None:
    assert POLL_S < MAX_GAP_S, "or a silent control would be found later than its limit says"


def test_a_control_that_starts_has_time(world: World) -> None:
    for _ in range(25):
        world.tick(1.0)
    assert not world.sent
    for _ in range(8):
        world.tick(1.0)
    assert world.sent


def test_a_pid_that_is_not_that_process_any_more_is_not_touched(world: World) -> None:
    ready(world)
    pid = world.pids["scheduler-0"]
    assert world.core.kill("scheduler-0", pid, "hang")
    world.die("scheduler-0", -11)
    world.tick()
    assert world.pids["scheduler-0"] != pid
    world.tick(1.0)
    assert (pid, signal.SIGKILL) not in world.sent
    assert not world.core.kill("scheduler-0", pid, "hang")
    assert not world.core.kill("no-such", 1, "hang")


def test_the_epoch_counts_engines_not_ranks_or_helpers(world: World) -> None:
    ready(world)
    world.die("detokenizer-0", 1)
    world.tick()
    assert world.core.epoch == 1
    world.die("scheduler-0", 1)
    world.tick()
    assert world.core.epoch == 2


def test_the_loop_sleeps_until_the_next_thing_to_do() -> None:
    world = make(restart=RestartArgs(backoff=(7.0, 7.0, 7.0)), control_timeout=100.0)
    ready(world)
    world.die("scheduler-0", 1)
    world.tick()
    assert world.core.seconds_left() == pytest.approx(7.0)
    world.core.on_term("SIGTERM")
    world.tick(8.0)
    assert 20 <= world.core.seconds_left() <= 30
    world.core.shutdown(0, "test")
    assert world.core.seconds_left() == pytest.approx(10.0)


def test_a_drain_without_a_frontend_has_nothing_to_wait_for(world: World) -> None:
    ready(world, requests=4)
    world.core.on_term("SIGTERM")
    world.die("frontend-0", 1)
    for _ in range(5):
        world.tick()
    assert world.core.exit_status == 0


def test_a_control_that_replaces_another_and_hangs_is_replaced_soon(world: World) -> None:
    ready(world)
    world.die("control-0", -9)
    world.tick()
    second = world.pids["control-0"]
    for _ in range(9):
        world.tick(1.0)
    assert world.pids["control-0"] == second
    for _ in range(4):
        world.tick(1.0)
    assert second not in world.pids.values(), "killed; the wait before the next is the restart policy's"


def test_control_comes_back_in_a_drain_while_requests_are_in_flight(world: World) -> None:
    ready(world, requests=4)
    world.core.on_term("SIGTERM")
    world.die("control-0", 1)
    world.core.tick()
    world.core.tick()
    # Its first report has not come, so what the old one said still holds.
    assert world.pids["control-0"]
    assert world.core.exit_status is None


def test_giving_up_wins_over_a_stop_and_the_first_reason_over_later_ones(world: World) -> None:
    ready(world)
    world.deaf = set(world.pids)
    world.core.shutdown(0, "asked")
    world.core.give_up(70, "lost")
    world.core.give_up(71, "later")
    world.tick(2.0)
    world.tick()
    assert world.core.exit_status == 70
    assert world.core.last_words == ["lost"]


def test_what_fails_of_a_start_that_was_stopped_is_no_fault() -> None:
    world = make()
    world.deaf = set(world.pids)
    world.core.on_term("SIGTERM")
    world.core.give_up(70, "warm-up failed: the generation did not finish")
    world.deaf = set()
    world.tick(60.0)
    world.tick()
    assert (world.core.exit_status, world.core.last_words) == (0, [])


def test_a_stopped_unit_is_not_restarted_by_control(world: World) -> None:
    ready(world)
    world.core.hold("engine")
    assert world.core.restart("engine") == "engine was stopped by an operator"
    world.core.release("engine")
    assert world.core.restart("engine") is None
    assert world.core.restart("nonsense") == "no such unit: nonsense"


def test_last_exit_holds_the_last_lines(world: World) -> None:
    ready(world)
    world.die("scheduler-0", -6)
    last = next(p for p in world.core.snapshot()["processes"] if p["name"] == "scheduler-0")["last_exit"]
    assert (last["status"], last["reason"], last["stderr"]) == (-6, "signal", "last line of scheduler-0")


def test_a_start_that_gets_nowhere_ends() -> None:
    world = make(startup_timeout=20.0, control_timeout=300.0)
    for _ in range(23):
        world.tick(1.0)
    assert world.core.mode == "starting"
    world.core.report(Report(state="loading", stage="weights"))
    for _ in range(23):
        world.tick(1.0)
        world.core.report(Report(state="loading", stage="weights"))
    assert world.core.mode == "starting"
    for _ in range(5):
        world.tick(1.0)
    assert world.core.exit_status == 70
    assert "no progress" in world.core.last_words[0]


@pytest.mark.parametrize(("status", "ends"), [(71, 71), (78, 78), (70, 70), (1, 70), (0, 70)])
def test_a_control_that_ends_during_the_start_ends_it_with_its_own_words(world: World, status: int, ends: int) -> None:
    world.die("control-0", status)
    world.tick()
    world.tick(0.1)
    assert world.core.exit_status == ends and "control-0 ended with" in world.core.last_words[0]
    assert status == 0 or "last line of control-0" in world.core.last_words[0]


def test_a_process_that_the_system_does_not_let_start_ends_the_start_with_the_limits_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "spawn", lambda self, name: exhausted(OSError(errno.EAGAIN, "")))
    world = make()
    world.tick()
    world.tick()
    assert world.core.exit_status == 71
    assert "control-0 could not be started: no more processes" in world.core.last_words[0] and "ulimit -u" in world.core.last_words[0]


def test_a_control_that_is_killed_during_the_start_gets_one_more_try(world: World) -> None:
    world.die("control-0", -9)
    world.tick()
    assert world.pids["control-0"] and world.core.mode == "starting"
    world.die("control-0", -9)
    world.tick()
    world.tick(0.1)
    assert world.core.exit_status == 70 and "SIGKILL" in world.core.last_words[0]


def test_once_all_is_up_a_death_is_a_restart_though_nobody_has_been_told_of_ready(world: World) -> None:
    world.core.report(Report(state="warming", progressing=True, up=True))
    world.die("scheduler-0", -9)
    world.tick(1.0)
    assert world.pids["scheduler-0"] and world.core.stop is None and world.readied == []
    for _ in range(2):
        ready(world)
    assert (len(world.readied), world.core.mode) == (1, "running")


def test_once_all_is_up_a_stop_is_a_drain_though_nobody_has_been_told_of_ready(world: World) -> None:
    world.core.report(Report(state="warming", progressing=True, up=True))
    world.core.on_term("SIGTERM")
    assert world.core.mode == "draining" and world.core.stop is None
    ready(world)
    assert world.readied == [] and world.core.mode == "draining"


def test_what_was_asked_for_too_long_ago_is_not_done(world: World) -> None:
    class Supervisor:
        core = world.core

        def wake(self) -> None: ...

    ready(world)
    namespace, before = LlmdNamespace(Supervisor()), dict(world.pids)  # type: ignore[arg-type]
    assert json.loads(namespace.restartEngine(json.dumps({"until": time.monotonic() - 1})))["ok"] is False
    assert json.loads(namespace.kill(json.dumps({"name": "frontend-0", "pid": world.pids["frontend-0"], "until": time.monotonic() - 1})))["ok"] is False
    assert world.pids == before
    assert json.loads(namespace.restartEngine(json.dumps({"until": time.monotonic() + 10})))["ok"] is True


def test_engines_that_die_of_one_suspect_are_not_counted_and_come_back_at_once() -> None:
    world = make(restart=RestartArgs(max=1, backoff=(0.0, 20.0, 30.0)))
    ready(world)
    for death in range(4):
        world.die("scheduler-0", -9, alone=True)
        world.tick()
        assert world.pids["scheduler-0"] and world.core.epoch == 2 + death
    world.die("scheduler-0", -9)
    world.tick()
    assert world.pids["scheduler-0"] and world.core.epoch == 6
    world.die("scheduler-0", -9)
    world.tick()
    assert world.core.last_words[0].startswith("giving up")


def test_a_process_knows_whether_the_one_before_it_crashed(world: World) -> None:
    ready(world)
    assert not world.core.crashed("scheduler-0")
    told: list[bool] = []
    spawn = world.spawn

    def spy(name: str) -> None:
        spawn(name)
        told.append(world.core.crashed(name))

    world.spawn = spy  # type: ignore[method-assign]
    world.die("scheduler-0", -9)
    world.tick()
    world.core.restart("engine", "reload")
    world.tick()
    world.die("scheduler-0", -9)
    world.tick()
    world.tick(5.0)
    assert told == [True, False, True]


def test_the_snapshot_counts_the_restarts_that_the_budget_counts() -> None:
    world = make(restart=RestartArgs(max=5, window=60.0, backoff=(0.0, 0.0, 0.0)))
    world.core.report(Report(state="ready", ready=True))

    def counted() -> int:
        return next(view["recent_restarts"] for view in world.core.snapshot()["processes"] if view["role"] == "scheduler")

    for number in (1, 2):
        world.die("scheduler-0", 3)
        world.tick()
        assert counted() == number
    world.tick(61.0)
    assert counted() == 0
