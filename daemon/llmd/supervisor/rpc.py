"""XML-RPC on RUN/private/supervisor.sock: the namespace `llmd` for what control asks for, and supervisord's own for supervisorctl.

`llmd` takes and returns JSON texts, so that nothing depends on XML-RPC's types. Both factories refuse any other supervisord:
one that was given our file by hand would start a second set of processes without llmd's protections.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from supervisor.rpcinterface import SupervisorNamespaceRPCInterface
from supervisor.states import RUNNING_STATES, STOPPED_STATES, ProcessStates
from supervisor.xmlrpc import Faults, RPCError

from llmd.config.server_args import RestartArgs
from llmd.errors import EXIT_GAVE_UP, EXIT_OK
from llmd.supervisor.loop import LlmdSupervisor

#: How often a waiting call looks again; 0, supervisord's figure, takes a whole core.
WAIT_S = 0.05
TOO_LATE = "this was asked for too long ago, and is not done"


class _Kill(Struct):
    name: str
    pid: int
    reason: Literal["hang", "stop", "reload"] = "hang"
    why: str = ""
    until: float = math.inf
    """Monotonic, as in _Restart: the caller waits no longer, and is not to be surprised."""


class _Restart(Struct):
    unit: str = "engine"
    reason: str = ""
    until: float = math.inf


class _Configure(Struct, forbid_unknown_fields=True):
    """What is given is gone by from now on."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    restart: RestartArgs | None = None
    drain_timeout: float | None = None
    control_timeout: float | None = None


class _End(Struct):
    status: int = EXIT_OK
    why: str = ""


class LlmdNamespace:
    """For control. A bad argument is a fault, and changes nothing."""

    def __init__(self, supervisor: LlmdSupervisor) -> None:
        self._supervisor = supervisor
        self._core = supervisor.core

    def kill(self, text: str) -> str:
        """{"name","pid","reason"}: stacks, then SIGKILL, if `pid` is still that process."""
        asked = _decode(text, _Kill)
        if self._too_late(asked.until):
            return self._answer(TOO_LATE)
        return self._answer(None if self._core.kill(asked.name, asked.pid, asked.reason, asked.why) else f"{asked.name} is not pid {asked.pid} any more")

    def restartEngine(self, text: str) -> str:
        """{"reason"}: all ranks at once, not counted in the budget. In the answer, `epoch` is the one that this ends."""
        if self._too_late(_decode(text, _Restart).until):
            return self._answer(TOO_LATE)
        return self._answer(self._core.restart("engine"), epoch=self._core.epoch)

    def restartAll(self, text: str) -> str:
        """{"until"}: drain and stop, then start anew: same pid, same command line, the configuration as it is then."""
        if self._too_late(_decode(text, _Restart).until):
            return self._answer(TOO_LATE)
        return self._answer(self._core.restart_all())

    def restart(self, text: str) -> str:
        """{"unit","reason"}: the same for one unit: `engine`, `detokenizer-0`, `frontend-N`."""
        return self._answer(self._core.restart(_decode(text, _Restart).unit))

    def configure(self, text: str) -> str:
        """{"log_level","restart","drain_timeout","control_timeout"}, each one optional: go by these values."""
        asked = _decode(text, _Configure)
        if asked.log_level is not None:
            logging.getLogger().setLevel(asked.log_level.upper())
        given = {name: value for name in ("restart", "drain_timeout", "control_timeout") if (value := getattr(asked, name)) is not None}
        self._core.settings = replace(self._core.settings, **given)
        return self._answer(None)

    def shutdown(self, text: str) -> str:
        """{"status","why"}: stop all in order, then end with status."""
        asked = _decode(text, _End)
        self._core.shutdown(asked.status, asked.why or "control asked")
        return self._answer(None)

    def giveUp(self, text: str) -> str:
        """{"status","why"}: stop all at once, then end with status and `why` as the last words."""
        asked = _decode(text, _End)
        self._core.give_up(asked.status or EXIT_GAVE_UP, asked.why or "control gave up")
        return self._answer(None)

    @staticmethod
    def _too_late(until: float) -> bool:
        return time.monotonic() > until

    def _answer(self, fault: str | None, **more: int) -> str:
        self._supervisor.wake()
        return json.dumps({"ok": fault is None, "message": fault or "", **more})


class SupervisorNamespace(SupervisorNamespaceRPCInterface):  # type: ignore[misc]
    """supervisord's methods, where they would bypass the core."""

    def shutdown(self) -> bool:
        """As SIGTERM."""
        self.supervisord.core.on_term("supervisorctl shutdown")
        self.supervisord.wake()
        return True

    def restart(self) -> bool:
        """supervisord would restart everything, itself included."""
        raise RPCError(Faults.FAILED, "not with llmd: use `llmctl restart` or `systemctl restart llmd`")

    def addProcessGroup(self, name: str) -> bool:
        """The set of processes is the plan's."""
        raise RPCError(Faults.FAILED, "llmd's processes follow from its configuration")

    def removeProcessGroup(self, name: str) -> bool:
        """The set of processes is the plan's."""
        raise RPCError(Faults.FAILED, "llmd's processes follow from its configuration")

    def startProcess(self, name: str, wait: bool = True) -> Any:
        """Start the process's whole unit, by the policy, in the next round."""
        self._update("startProcess")
        group, process = self._getGroupAndProcess(name)
        if process is None:
            return self.startProcessGroup(group.config.name, wait)
        if process.get_state() in RUNNING_STATES:
            raise RPCError(Faults.ALREADY_STARTED, name)
        core = self.supervisord.core
        if core.mode in ("draining", "stopping"):
            raise RPCError(Faults.FAILED, "llmd is stopping")
        core.release(core.unit_of(process.config.name).name)
        self.supervisord.wake()

        def started() -> Any:
            if process.spawnerr and process.get_state() not in RUNNING_STATES:
                raise RPCError(Faults.SPAWN_ERROR, name)
            return True if process.get_state() == ProcessStates.RUNNING else _not_done()

        return _deferred(started, self) if wait else True

    def stopProcess(self, name: str, wait: bool = True) -> Any:
        """Stop the process's whole unit, and cancel its pending restart."""
        self._update("stopProcess")
        group, process = self._getGroupAndProcess(name)
        if process is None:
            return self.stopProcessGroup(group.config.name, wait)
        core = self.supervisord.core
        unit = core.unit_of(process.config.name)
        waiting = not core.states[unit.name].up
        core.hold(unit.name)
        running = [member for member in unit.members if self.supervisord.pid(member)]
        if not running and not waiting:
            raise RPCError(Faults.NOT_RUNNING, name)
        for member in running:
            self.supervisord.terminate(member)
        self.supervisord.wake()

        def stopped() -> Any:
            return True if process.get_state() in STOPPED_STATES else _not_done()

        return _deferred(stopped, self) if wait and running else True

    def stopProcessGroup(self, name: str, wait: bool = True) -> Any:
        """Also cancels a restart that is pending while no member runs."""
        group = self.supervisord.process_groups.get(name)
        if group is not None:
            core = self.supervisord.core
            for process in group.processes.values():
                core.hold(core.unit_of(process.config.name).name)
        return super().stopProcessGroup(name, wait)


def supervisor_namespace(supervisor: Any, **_: str) -> SupervisorNamespace:
    """Factory named in the configuration file."""
    return SupervisorNamespace(_ours(supervisor))


def llmd_namespace(supervisor: Any, **_: str) -> LlmdNamespace:
    """Factory named in the configuration file."""
    return LlmdNamespace(_ours(supervisor))


def _ours(supervisor: Any) -> LlmdSupervisor:
    if not isinstance(supervisor, LlmdSupervisor):
        raise ValueError("this file belongs to llmd's own supervisord; start it with `llmd run`")
    return supervisor


def _decode(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text or "{}", type=kind)
    except msgspec.MsgspecError as error:
        raise RPCError(Faults.INCORRECT_PARAMETERS, str(error)) from None


def _not_done() -> Any:
    from supervisor.http import NOT_DONE_YET

    return NOT_DONE_YET


def _deferred(call: Any, interface: Any) -> Any:
    """A function makes supervisord answer later."""
    call.delay = WAIT_S
    call.rpcinterface = interface
    return call
