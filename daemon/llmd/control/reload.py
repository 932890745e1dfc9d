"""Reload of weights: check, commit, roll back.

The new files are checked by the same child that checks at start, compared with what runs, and only then committed: the boot
file is replaced and the engine restarted. If the new engine fails, the old boot file comes back. What is needed for that is
in control.state before anything is changed, so a replaced control finishes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec

from llmd.control import drain, weights
from llmd.control.core import Core
from llmd.control.engine import await_engine, await_recovery, engine_results
from llmd.control.operation import stopped
from llmd.control.plan import Plan, in_flight, replaces_engine, rids
from llmd.control.state_file import replace_file
from llmd.control.supervisor_client import SupervisorAway
from llmd.control.verbs import REPLY_TIMEOUT, Keep, ReloadParams, refuse_unless_up
from llmd.errors import RequestError
from llmd.plan.spec import Boot

log = logging.getLogger("llmd.control")

#: Seconds that clients get to take the error event of a reload that does not wait for them.
FAREWELL = 1.0

Save = Callable[[], Awaitable[None]]


class RolledBack(RequestError):
    """The new weights did not come up; the old ones are back."""


async def plan(core: Core, params: ReloadParams) -> Plan:
    """Check the new weights, and say what loading them means. `prepared` is their boot file."""
    refuse_unless_up(core)
    if not core.machine.can("reload"):
        raise RequestError(f"the daemon is {core.machine.state}", code="busy")
    boot = await _prepare(core, params)
    mode, timeout = _choices(core, params)
    first = {
        "drain": f"refuse new requests, wait up to {timeout:g} s for running ones",
        "abort": "refuse new requests, end running ones with the error `reloaded`",
        "now": "end what has begun to answer with the error `reloaded`, hold the rest",
    }[mode]
    made = replaces_engine(core, aborts=mode != "drain", first=[f"check {boot.files.path or boot.files.name}", first])
    if mode == "drain":
        made.requests_held, made.requests_finished = 0, made.requests_held
    elif mode == "now":
        rows = in_flight(core)
        begun, fresh = [row for row in rows if row["output_tokens"]], [row for row in rows if not row["output_tokens"]]
        made.requests_aborted, made.requests_held = len(rids(begun)), len(rids(fresh))
    made.details = {"weights_version": boot.files.weights_version, "from": core.boot.files.weights_version, "mode": mode}
    made.prepared = boot
    return made


async def run(core: Core, params: ReloadParams | None, made: Plan | None, keep: Keep, save: Save) -> dict[str, Any]:
    """Carry the plan out. Without one: finish what a control before this one had begun."""
    if params is None or made is None:
        before = core.remembered.reload_epoch
        old = Boot.load(core.remembered.previous_boot or b"")
        core.holding = True  # the frontends may still drain for it
        if core.boot == old:
            await _stay_with_the_old(core, before, keep, save)
        if core.epoch <= before:
            before = max(core.epoch, await core.supervisor.restart_engine("reload"))
        await _see_through(core, old, before, keep, save)
    else:
        mode, timeout = _choices(core, params)
        await replace_engine(core, made.prepared, mode, timeout, keep, save)
    return {"weights_version": core.boot.files.weights_version, "epoch": core.epoch}


async def _stay_with_the_old(core: Core, before: int, keep: Keep, save: Save) -> NoReturn:
    """The old boot file is in force: the new one was not yet, or not any more. An engine that was started since may have read either."""
    if core.epoch > before:
        before = max(core.epoch, await core.supervisor.restart_engine("reload"))
        await await_recovery(core, before, _deadline(core))
    keep(engine_results(core))
    await _finish(core, save)
    raise RolledBack("control was replaced while it ran; the old weights go on", code="aborted")


async def replace_engine(core: Core, boot: Boot, mode: str, patience: float, keep: Keep, save: Save) -> None:
    """Replace the boot file, start the engine anew, and go back to the old one if it does not come up. Raises RolledBack, RequestError."""
    old = core.boot
    _refuse_in_a_stop(core)
    core.machine.fire("reload", f"to {boot.files.weights_version}" if boot.files != old.files else "the configuration has changed")
    try:
        before = await _commit(core, boot, mode, patience, save)
    except BaseException as error:
        if isinstance(error, SupervisorAway):
            await replace_boot(core, old)
        keep(engine_results(core))
        await _finish(core, save)
        raise
    await _see_through(core, old, before, keep, save)


async def _see_through(core: Core, old: Boot, before: int, keep: Keep, save: Save) -> None:
    """Wait for the engine that was started after epoch `before`."""
    try:
        fault = await await_engine(core, before, _deadline(core))
        if fault:
            await _roll_back(core, old, fault)
    except SupervisorAway:
        await replace_boot(core, old)
        raise
    finally:
        keep(engine_results(core))
        await _finish(core, save)


async def _prepare(core: Core, params: ReloadParams) -> Boot:
    """The boot file of the new weights. Nothing is changed yet."""
    boot = core.boot
    path = weights.allowed_path(boot, params.path)
    # Clients go on with the name they know.
    model = msgspec.structs.replace(boot.args.model, path=path, served_name=boot.served_name)
    args = msgspec.structs.replace(boot.args, model=model)
    files = await weights.check(msgspec.structs.replace(boot, args=args))
    mismatch = weights.mismatch(boot.files, files)
    if mismatch:
        raise RequestError(f"these weights do not fit what runs: {mismatch}", code="incompatible_weights", param="path")
    if params.version is not None:
        files = msgspec.structs.replace(files, weights_version=params.version)
    return msgspec.structs.replace(boot, args=args, files=files)


def _choices(core: Core, params: ReloadParams) -> tuple[str, float]:
    """(mode, longest wait): as asked, else as configured."""
    configured = core.boot.args.reload
    return params.mode or configured.mode, params.timeout_s if params.timeout_s is not None else configured.timeout


async def _commit(core: Core, boot: Boot, mode: str, patience: float, save: Save) -> int:
    """Drain if asked to, replace the boot file, restart. Returns the epoch before."""
    if mode == "abort":
        await _abort(core)
    elif mode == "drain":
        left = await drain.drain(core, time.monotonic() + patience)
        if left:
            raise RequestError(f"{drain.unfinished(left)} within {patience:g} s; the old weights go on", code="timeout")
    _refuse_in_a_stop(core)
    before = core.epoch
    core.remembered.previous_boot, core.remembered.reload_epoch = core.boot.dump(), before
    await save()
    await replace_boot(core, boot)
    # An engine that the supervisor has started since on its own may still have read the old boot file.
    return max(before, await core.supervisor.restart_engine("reload"))


def _refuse_in_a_stop(core: Core) -> None:
    """It may have begun while something took its time. Nothing has been changed yet."""
    if core.stopping:
        raise stopped()


async def _abort(core: Core) -> None:
    """End what runs with `reloaded`, and let nothing new in until the new weights are there."""
    await drain.drain(core, time.monotonic())
    await core.channel.command(core.table.role("frontend"), "abort", {"everything": True, "code": "reloaded"}, within=REPLY_TIMEOUT)
    await drain.drain(core, time.monotonic() + FAREWELL)


async def _roll_back(core: Core, old: Boot, fault: str) -> None:
    log.error("the new engine did not come up, going back to the old one (weights %s): %s", old.files.weights_version, fault)
    await replace_boot(core, old)
    before = max(core.epoch, await core.supervisor.restart_engine("reload"))
    again = await await_recovery(core, before, _deadline(core))
    after = f"nor does the old one: {again}" if again else f"the old one is back, with weights {old.files.weights_version}"
    raise RolledBack(f"the new engine did not come up ({fault}); {after}", code="internal_error")


async def _finish(core: Core, save: Save) -> None:
    core.remembered.previous_boot = None
    if not core.stopping:  # a stop goes its own way
        if core.machine.can("reloaded"):
            core.machine.fire("reloaded", f"weights {core.boot.files.weights_version}")
        if core.holding and core.machine.state != "draining":
            await drain.resume(core)
    with contextlib.suppress(OSError):
        await save()


async def replace_boot(core: Core, boot: Boot) -> None:
    """What every process that starts from now on goes by. Raises OSError."""
    await asyncio.get_running_loop().run_in_executor(None, replace_file, core.boot.ports.boot, boot.dump())
    core.boot = boot


def _deadline(core: Core) -> float:
    return time.monotonic() + core.boot.args.supervision.startup_timeout
