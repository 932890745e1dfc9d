"""The supervisor's mind: modes, restarts, stops, the watch over control. It acts through `Hands` and owns no process itself.

Called from supervisord's one thread: `tick` at least every POLL_S and after each event; `report` from the socket for
reports; the other requests from the XML-RPC namespace `llmd`. Nothing in here blocks.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

from llmd.errors import EXIT_CONFIG, EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_OK, EXIT_RESOURCE
from llmd.plan.context import STACKS_SIGNAL
from llmd.plan.spec import ProcessSpec
from llmd.supervisor import policy
from llmd.supervisor.children import Child, LastExit, Reason
from llmd.supervisor.facts import Crash, Hands, Report, Settings
from llmd.supervisor.notify import Notifier
from llmd.supervisor.os_seam import Os
from llmd.supervisor.policy import EndStart, GiveUp, Kill, Mode, Spawn, Unit, UnitState, World
from llmd.supervisor.shutdown import StopSequence

log = logging.getLogger(__name__)

#: What control gets beyond drain_timeout to end the last requests with `shutting_down` before the supervisor stops everything itself.
DRAIN_GRACE_S = 3.0
#: A hung process has this long to write its stacks.
DUMP_S = 0.25
#: The first report of a control may take this long: it imports, binds and connects first.
CONTROL_START_S = 30.0
#: The same for one that replaces another: its files have just been read, and requests may be held until it is there.
CONTROL_RESTART_S = 10.0
#: A gap between two ticks counts for at most this much silence of control: a supervisor that was stopped itself kills nobody.
MAX_GAP_S = 1.5
#: Seconds beyond `startup_timeout` after which the supervisor itself ends a start that gets on no more; control, which names the culprit, is first.
START_GRACE_S = 5.0


class Core:
    """See the module's text."""

    def __init__(
        self,
        specs: tuple[ProcessSpec, ...],
        settings: Settings,
        hands: Hands,
        *,
        os_: Os,
        notifier: Notifier,
        tail: Callable[[str], list[str]],
        on_ready: Callable[[Report], None],
        on_state: Callable[[str, str, str], None],
        on_progress: Callable[[Report], None] = lambda report: None,
        died_alone: Callable[[ProcessSpec, int], bool] = lambda spec, epoch: False,
        on_crash: Callable[[Crash], None] = lambda crash: None,
    ) -> None:
        """`died_alone(spec, epoch)`: whether an engine's rank of that epoch died while it computed one suspected request and nothing else."""
        self.specs = specs
        self.settings = settings
        self.children = {spec.name: Child(spec) for spec in specs}
        self.units = {unit.name: unit for unit in policy.units_of(specs)}
        self.states = {name: UnitState() for name in self.units}
        self._unit_of = {name: unit for unit in self.units.values() for name in unit.members}
        self.epoch = 1
        self.mode: Mode = "starting"
        self.stop: StopSequence | None = None
        self.exit_status: int | None = None
        """Set when the loop is to end."""
        self.again = False
        """When it has ended with status 0, llmd is to be started anew in this process."""
        self.last_words: list[str] = []
        """Why llmd gave up, line by line."""
        self.failed_at = ""
        """Whose death ended llmd, and what it was doing, as far as is known: `scheduler-0: weights`."""
        self._hands = hands
        self._os = os_
        self._notifier = notifier
        self._tail = tail
        self._on_ready = on_ready
        self._on_state = on_state
        self._on_progress = on_progress
        self._died_alone = died_alone
        self._on_crash = on_crash
        self._verdicts: dict[int, str] = {}
        """pid of a process that control found hanging -> why."""
        self._known: Report | None = None
        """What control has last said, be it another one by now."""
        self._histories: dict[str, tuple[float, ...]] = {}
        self._started = os_.monotonic()
        self._drain_deadline: float | None = None
        self._excused: set[str] = set()
        self._asked: set[str] = set()
        """Units that restart because control asked for it."""
        self._executions: list[tuple[float, str, int]] = []
        self._report: Report | None = None
        self._requests = 0
        """In flight, as control has last said, be it another one by now."""
        self._silence = self._standstill = 0.0
        self._hangups, self._last_tick, self._start_is_off = 0, self._started, False
        self._control = next((spec.name for spec in specs if spec.role == "control"), None)

    # ---------------------------------------------------------------- what happens

    def on_starting(self, name: str) -> None:
        """A process is about to be forked, by us or by an operator."""
        self.children[name].starts(self._os.monotonic())
        if name == self._control:
            self._report, self._silence = None, 0.0

    def crashed(self, name: str) -> bool:
        """Whether a process that is about to start has ended by itself before, not because it was asked to."""
        return self.children[name].incarnation > 1 and self.unit_of(name).name not in self._asked

    def on_exit(self, name: str, pid: int, status: int, administrative: bool) -> None:
        """A process has been reaped."""
        child = self.children[name]
        if self._died_alone(child.spec, self.epoch):
            self._excused.add(name)
        ended = child.ends(pid, status, administrative or self.stop is not None, self._os.monotonic(), "\n".join(self._tail(name)))
        if ended.reason == "reload":
            log.info("%s (pid %d) has been ended to be replaced", name, pid)
        elif ended.reason == "stop":
            log.info("%s (pid %d) has stopped: %s", name, pid, ended.describe())
        else:
            log.error("%s (pid %d) %s: %s", name, pid, "hung and was killed" if ended.reason == "hang" else "died", ended.describe())
            known = self._known or Report()
            why, phase = self._verdicts.pop(pid, ""), known.phases.get(name, "")
            uptime = self._os.monotonic() - child.started_at
            self._on_crash(Crash(child.spec, pid, child.incarnation, self.epoch, uptime, ended, why, phase, known.weights_version))
        if name == self._control and self.mode in ("running", "draining") and self._known is not None:
            self._notifier.status(f"{self._known.state}; control restarts")  # the rest serves on, as far as anyone knows

    def on_term(self, why: str) -> None:
        """SIGTERM: drain, then stop. A second one changes nothing, but that llmd does not start again."""
        self.again = False
        if self.mode in ("draining", "stopping"):
            return
        self._notifier.stopping()
        if self.settings.external_frontend:
            self._begin_stop(EXIT_OK, why, quick=True)
            return
        if self.mode == "starting":
            log.info("%s during the start: stopping", why)
            self._start_is_off = True
            self.shutdown(EXIT_OK, why)
            return
        requests = self._report.requests if self._report else None
        count = "running requests" if requests is None else f"{requests} running request{'' if requests == 1 else 's'}"
        again = "; interrupt again to stop at once" if why == "SIGINT" else ""
        log.info("%s: draining; %s may take up to %g s%s", why, count, self.settings.drain_timeout, again)
        self.mode = "draining"
        self._requests = max(1, self._requests)  # until control has said how many: it alone knows
        self._drain_deadline = self._os.monotonic() + self.settings.drain_timeout + DRAIN_GRACE_S
        self._on_state("draining", "", why)
        self._hands.tell("drain")

    def on_interrupt(self, times: int) -> None:
        """SIGINT: the first is a SIGTERM; the second stops at once, with status 130."""
        if times == 1:
            self.on_term("SIGINT")
        elif self.stop is None or not self.stop.quick:
            self.again = False
            log.warning("second SIGINT: stopping at once")
            self._begin_stop(EXIT_INTERRUPTED, "second SIGINT", quick=True)

    def on_hangup(self) -> None:
        """SIGHUP: have control read the configuration again; one that is away does so when it is back."""
        log.info("SIGHUP: the configuration is read again")
        self._hangups += 1
        self._hands.tell("hangup")

    # ---------------------------------------------------------------- what is asked (namespace `llmd`)

    def report(self, report: Report) -> dict[str, Any]:
        """control's word; the answer is the snapshot."""
        before, self._report, self._silence = self._report, report, 0.0
        self._known = report
        self._requests = report.requests if report.requests is not None else self._requests
        if before is None or (before.state, before.stage, before.reason) != (report.state, report.stage, report.reason):
            self._on_state(report.state, report.stage, report.reason)
        self._notifier.status(report.status or report.state)
        self._notifier.reloading(report.reloading or report.state == "reloading")
        begins = self.mode in ("starting", "up")
        if begins and (before is None or (before.state, before.stage, before.progress) != (report.state, report.stage, report.progress)):
            self._notifier.extend(self.settings.startup_timeout)
            self._standstill = 0.0
            self._on_progress(report)
        if begins and (report.up or report.ready):
            self.mode = "running" if report.ready else "up"
        if begins and report.ready:
            self._notifier.ready()
            self._on_ready(report)
        return self.snapshot()

    def kill(self, name: str, pid: int, reason: Reason, why: str = "") -> bool:
        """A hung child: stacks to its stderr, then SIGKILL. False if `pid` is not that process any more."""
        if name not in self.children or pid <= 0 or self._hands.pid(name) != pid:
            return False
        self.children[name].expected = (pid, reason)
        self._verdicts = {pid: why}
        self._os.kill(pid, STACKS_SIGNAL)
        self._executions.append((self._os.monotonic() + DUMP_S, name, pid))
        return True

    def restart(self, unit_name: str, reason: Reason = "reload") -> str | None:
        """Restart a unit as a whole, not counted in its budget. Returns why not, or None."""
        unit = self.units.get(unit_name)
        if unit is None:
            return f"no such unit: {unit_name}"
        if self.mode == "stopping":
            return "llmd is stopping"
        if self.mode == "starting" and unit.group != "control":
            return "llmd is starting"
        if self.states[unit_name].held:
            return f"{unit_name} was stopped by an operator"
        if any(self._hands.state(name) == "stopping" for name in unit.members):
            return f"{unit_name} is being stopped by an operator"
        self._asked.add(unit_name)
        self.states[unit_name], actions = policy.ask(unit, self._world(), self._os.monotonic())
        self._act(unit, actions, reason)
        return None

    def restart_all(self) -> str | None:
        """Stop as on SIGTERM, then start anew. Returns why not, or None."""
        if self._notifier.managed:
            return "systemd runs llmd, and only `systemctl restart` can restart it as a whole"
        if self.mode in ("draining", "stopping"):
            return "llmd is stopping"
        self.on_term("restart of llmd as a whole")
        self.again = True
        return None

    def hold(self, unit_name: str) -> None:
        """An operator stops a unit; nothing but an operator starts it again."""
        self.states[unit_name] = policy.hold(self.units[unit_name], self._world())

    def release(self, unit_name: str) -> None:
        """An operator starts a unit."""
        self._asked.add(unit_name)
        self.states[unit_name] = UnitState(due=self._os.monotonic(), asked=True)

    def unit_of(self, name: str) -> Unit:
        """The unit that a process belongs to."""
        return self._unit_of[name]

    def shutdown(self, status: int, why: str) -> None:
        """Stop everything in order, then end with `status`."""
        if self.stop is None:
            self._begin_stop(status, why, quick=False)

    def give_up(self, status: int, why: str) -> None:
        """Stop everything at once, then end with `status` and `why` as the last words; unless the start was stopped: what fails of it then is no fault."""
        if self.stop is None or (not self.stop.quick and self.stop.status == EXIT_OK and not self._start_is_off):
            self.last_words = why.splitlines() or [f"status {status}"]
            self._begin_stop(status, why, quick=True)

    def snapshot(self) -> dict[str, Any]:
        """The truth about all processes."""
        now = self._os.monotonic()
        left = None if self._drain_deadline is None else max(0.0, self._drain_deadline - DRAIN_GRACE_S - now)
        return {
            "start_id": self.settings.start_id,
            "pid": self._os.pid(),
            "uptime_s": round(now - self._started, 3),
            "rss_bytes": self._os.rss_bytes(self._os.pid()),
            "cpu_s": self._os.cpu_s(),
            "epoch": self.epoch,
            "stopping": self.mode in ("draining", "stopping"),
            "drain_left_s": left,
            "hangups": self._hangups,
            "managed": self._notifier.managed,
            "processes": [self._snapshot_of(name, now) for name in self.children],
        }

    def _snapshot_of(self, name: str, now: float) -> dict[str, Any]:
        pid, state = self._hands.pid(name), self._hands.state(name)
        unit = self.unit_of(name)
        due, recent = self.states[unit.name].due, policy.recent(self.settings.restart, self._histories.get(unit.group, ()), now)
        backoff = max(0.0, due - now) if not pid and due < policy.NEVER else 0.0
        return self.children[name].snapshot(pid, "backoff" if backoff else state, now, backoff, len(recent))

    # ---------------------------------------------------------------- the tick

    def tick(self) -> bool:
        """One look at everything. True when processes were started, so that supervisord should look again at once."""
        now = self._os.monotonic()
        self._watch_control(now)
        self._watch_start(now)
        self._execute(now)
        spawned = self._step_units(now)
        self._watch_drain(now)
        self._step_stop(now)
        self._notifier.tick(now, self._healthy())
        self._last_tick = now
        return spawned

    def seconds_left(self) -> float:
        """How long nothing needs to be done, unless something happens."""
        now = self._os.monotonic()
        times = [at for at, _, _ in self._executions]
        times += [state.due for state in self.states.values() if not state.up and now < state.due < policy.NEVER]
        times += [self._drain_deadline] if self._drain_deadline is not None and self.stop is None else []
        times += [self.stop.deadline] if self.stop is not None and now < self.stop.deadline else []
        ping = self._notifier.next_wake(self._healthy())
        times += [ping] if ping is not None else []
        if self._control is not None and self._hands.pid(self._control):
            times.append(self._last_tick + max(0.0, self._control_limit() - self._silence))
        return max(0.0, min(times) - now) if times else 60.0

    def _alive(self) -> frozenset[str]:
        return frozenset(name for name in self.children if self._hands.pid(name))

    def _world(self) -> World:
        # A control that hung, or that somebody killed, gets one more try during the start; one that ended by itself would do so again.
        pardoned = frozenset(name for name, child in self.children.items() if name == self._control and child.killed_once)
        return World(self.mode, self._alive(), owed=self._requests > 0, pardoned=pardoned, excused=frozenset(self._excused))

    def _step_units(self, now: float) -> bool:
        spawned, world = False, self._world()
        for name, unit in self.units.items():
            # Twice, so that a death whose restart is due at once is answered in the same round.
            for _ in range(2):
                state, history = self.states[name], self._histories.get(unit.group, ())
                outcome = policy.step(unit, state, history, self.settings.restart, world, now, self._os.random)
                if outcome.state is state and not outcome.actions:
                    break
                if state.up and not outcome.state.up:
                    self._excused -= set(unit.members)
                self.states[name], self._histories[unit.group] = outcome.state, outcome.history
                spawned |= self._act(unit, outcome.actions, "reload")
                world = self._world()
        return spawned

    def _act(self, unit: Unit, actions: tuple[policy.Action, ...], reason: Reason) -> bool:
        spawned = False
        for action in actions:
            match action:
                case Spawn(members):
                    self._spawn(unit, members)
                    spawned = True
                case Kill(members):
                    for name in members:
                        self._kill_now(name, reason)
                case EndStart(member):
                    self._fail(member, "llmd could not start")
                case GiveUp(member):
                    budget = self.settings.restart
                    self._fail(member, f"giving up: more than {budget.max} restarts of {unit.group} within {budget.window:g} s")
        return spawned

    def _spawn(self, unit: Unit, members: tuple[str, ...]) -> None:
        if unit.group == "engine" and any(self.children[name].incarnation for name in members):
            self.epoch += 1
        for name in members:
            if (error := self._hands.spawn(name)) is not None:
                self.children[name].last_exit = LastExit(error.exit_status, "spawn", self._os.monotonic(), error.message)
                log.error("%s could not be started: %s", name, error.message)
                break
        self._asked.discard(unit.name)

    def _kill_now(self, name: str, reason: Reason) -> None:
        pid = self._hands.pid(name)
        if pid:
            child = self.children[name]
            if child.expected is None or child.expected[0] != pid:
                child.expected = (pid, reason)
            self._os.kill_group(pid, signal.SIGKILL)

    def _fail(self, member: str, what: str) -> None:
        last = self.children[member].last_exit
        own = last.status if last is not None and self.mode == "starting" and last.status in (EXIT_CONFIG, EXIT_RESOURCE) else EXIT_GAVE_UP
        said = last.stderr.splitlines() if last else []
        first = f"{what}: {member} {last.ended}" if last else f"{what}: {member} has ended"
        if last is not None and last.reason in ("exit", "spawn") and last.status and said:
            first += f": {said[-1]}"
        stage = self._report.stage.partition(",")[0] if self._report is not None else ""
        self.failed_at = stage if stage.startswith(f"{member}: ") else f"{member}: start"
        lines = [first, *(f"{member}: {line}" for line in said)]
        self.give_up(own, "\n".join(lines))

    def _watch_control(self, now: float) -> None:
        """A control that is silent for too long is killed, and so replaced."""
        if self._control is None or self.stop is not None:
            return
        pid = self._hands.pid(self._control)
        if not pid:
            return
        self._silence += min(now - self._last_tick, MAX_GAP_S)
        if self._silence > self._control_limit():
            log.error("control has been silent for %.1f s", self._silence)
            self._silence = 0.0
            self.kill(self._control, pid, "hang", "silent")

    def _watch_start(self, now: float) -> None:
        """A start that nobody tells anything new of is over, whatever keeps control from ending it."""
        if self.mode not in ("starting", "up") or self.stop is not None:
            return
        self._standstill += min(now - self._last_tick, MAX_GAP_S)
        if self._standstill > self.settings.startup_timeout + START_GRACE_S:
            stage = self._report.stage or self._report.state if self._report is not None else "control has not said a word"
            self.give_up(EXIT_GAVE_UP, f"llmd could not start: no progress for {self._standstill:.0f} s: {stage}")

    def _control_limit(self) -> float:
        start = min(CONTROL_START_S if self.mode == "starting" else CONTROL_RESTART_S, self.settings.startup_timeout)
        return self.settings.control_timeout if self._report is not None else max(start, self.settings.control_timeout)

    def _healthy(self) -> bool:
        report = self._report
        return report is not None and report.progressing and self._silence <= self.settings.control_timeout

    def _execute(self, now: float) -> None:
        due = [item for item in self._executions if item[0] <= now]
        self._executions = [item for item in self._executions if item[0] > now]
        for _, name, pid in due:
            if self._hands.pid(name) == pid:
                self._os.kill_group(pid, signal.SIGKILL)

    def _watch_drain(self, now: float) -> None:
        """control ends a drain; without it the deadline does, or that there is nothing to wait for."""
        if self.mode != "draining" or self._drain_deadline is None or self.stop is not None:
            return
        alive = self._alive()
        served = any(spec.role == "frontend" and spec.name in alive for spec in self.specs)
        alone = self._control not in alive and not self._world().owed
        if now >= self._drain_deadline:
            self.shutdown(EXIT_OK, "the drain took too long")
        elif not served or alone:
            self.shutdown(EXIT_OK, "nothing is left to drain")

    def _begin_stop(self, status: int, why: str, *, quick: bool) -> None:
        log.info("stopping%s: %s", " at once" if quick else "", why.partition("\n")[0])
        self.mode = "stopping"
        self._notifier.stopping()
        self._notifier.status("stopping" if status == EXIT_OK else f"stopping: {why.partition(chr(10))[0]}")
        self.stop = StopSequence(self.specs, status=status, why=why, quick=quick, now=self._os.monotonic(), timeout=self.settings.stop_timeout)
        self._on_state("stopping", "", why.partition("\n")[0])

    def _step_stop(self, now: float) -> None:
        if self.stop is None:
            return
        alive = self._alive()
        for name, number in self.stop.step(alive, now):
            if number == signal.SIGKILL:
                self._kill_now(name, "stop")
            else:
                self._hands.terminate(name)
        if not alive:
            self.exit_status = self.stop.status
