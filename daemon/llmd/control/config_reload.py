"""Reload of the configuration: diff, plan, prepare, commit, roll back. All of it, or none of it.

The layers are read again as at start. What changes `live` is told to the processes that it concerns; what changes with the `engine` replaces the boot
file and restarts the engine, with requests held; what needs a `restart` of llmd keeps everything as it is. The boot file is replaced first, so that a
process that starts meanwhile goes by the new values; when anything refuses them, the old boot file is back and everyone is told the old values.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from msgspec.structs import replace

from llmd.config.server_args import ServerArgs
from llmd.config.source import Change, ConfigSource, overlay
from llmd.config.values import value_of
from llmd.control import reload, weights
from llmd.control.asking import tell
from llmd.control.channel import RankReply
from llmd.control.core import Core
from llmd.control.plan import Plan, replaces_engine
from llmd.control.reload import RolledBack, Save
from llmd.control.supervisor_client import SupervisorAway
from llmd.control.verbs import REPLY_TIMEOUT, ConfigReloadParams, Keep, refuse_unless_begun
from llmd.errors import ConfigError, RequestError
from llmd.plan.spec import Boot

log = logging.getLogger("llmd.control")

#: What a scheduler or llmd itself has filled in where the configuration leaves it open.
_FILLED = ("model.context_length", "model.threads", "model.quantization", "model.kv_cache_dtype", "memory.max_running_requests")
#: What the supervisor goes by: key -> its name there.
_SUPERVISORS = {"http.drain_timeout": "drain_timeout", "supervision.control_timeout": "control_timeout"}


async def plan(core: Core, params: ConfigReloadParams) -> Plan:
    """Read the configuration again, and say what taking it means. `prepared` is the boot file with it."""
    refuse_unless_begun(core)
    source = core.boot.source
    if source is None:
        raise RequestError("this llmd was started by a caller, with no configuration that could be read again", status=409)
    new = await read_again(core, source)
    changes = source.changes(new)
    told = [msgspec.to_builtins(change) for change in changes]
    fixed = [change.key for change in changes if change.reload == "restart"]
    if fixed:
        refused = {
            "code": "restart_required",
            "message": f"nothing was changed: {', '.join(fixed)} can only change with a restart of llmd",
            "hint": "llmctl restart --all takes all changes; or take these back, and reload",
        }
        return Plan(steps=[f"refuse: {', '.join(fixed)} needs a restart of llmd"], changes=told, refused=refused)
    boot = await _prepare(core, new, changes)
    if any(change.reload == "engine" for change in changes):
        reload_weights = boot.files != core.boot.files
        made = replaces_engine(core, aborts=reload_weights, first=["replace the boot file"])
        if any(change.key == "memory.preallocate" for change in changes):
            made.downtime_s = None  # the last start tells nothing of it
        made.steps.append("tell the other processes what is new")
    else:
        made = Plan(steps=["tell the processes what is new"] if changes else ["nothing has changed"])
    made.changes, made.prepared = told, boot
    return made


async def run(core: Core, made: Plan | None, keep: Keep, save: Save) -> dict[str, Any]:
    """Carry the plan out. Without one: a control before this one had begun, and all that is left to do is to finish its reload."""
    if made is None:
        before = Boot.load(core.remembered.previous_boot or b"").source
        data = await reload.run(core, None, None, keep, save)
        now = core.boot.source
        changes = before.changes(now) if before is not None and now is not None else []
        await _tell(core, changes, keep)
        return {**data, "changed": [change.key for change in changes]}
    changes = [msgspec.convert(change, Change) for change in made.changes]
    boot, old = made.prepared, core.boot
    if not changes:
        return {"changed": []}
    core.reconfiguring = True
    await core.reported()
    try:
        # A control that is replaced from here on tells everyone what stands in the boot file by then.
        core.remembered.configured = True
        await save()
        if any(change.reload == "engine" for change in changes):
            await reload.replace_engine(core, boot, "drain" if boot.files != old.files else "now", core.boot.args.reload.timeout, keep, save)
        else:
            await reload.replace_boot(core, boot)
        await _tell_or_undo(core, old, changes, keep)
    finally:
        core.reconfiguring = False
        core.report_due.set()
    log.info("configuration: %s", "; ".join(f"{change.key} {change.before} -> {change.after}" for change in changes))
    for change in changes:
        core.events.emit("config", f"{change.key}: {change.before} -> {change.after}", key=change.key, origin=change.origin)
    return {"changed": [change.key for change in changes]}


async def read_again(core: Core, source: ConfigSource) -> ConfigSource:
    """The configuration as it is now. Raises RequestError with every fault."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(None, lambda: source.read_again(allow_failpoints=core.boot.failpoints))
    except ConfigError as error:
        refused = RequestError("\n".join(error.faults), param="config")
        refused.hint = error.hint or "nothing was changed"
        raise refused from None


async def _prepare(core: Core, new: ConfigSource, changes: list[Change]) -> Boot:
    """The boot file with the new values; those that were resolved at the start are resolved as then."""
    boot, keys = core.boot, [change.key for change in changes]
    if not any(change.reload == "engine" for change in changes):
        return replace(boot, args=overlay(boot.args, new.args, keys), source=new)
    files = boot.files
    if any(key in ("model.path", "model.context_length", "model.verify_weights") for key in keys):
        candidate = overlay(boot.args, new.args, keys)
        checked = await weights.check(replace(boot, args=candidate))
        if "model.path" in keys:
            mismatch = weights.mismatch(boot.files, checked)
            if mismatch:
                raise RequestError(f"these weights do not fit what runs: {mismatch}", code="incompatible_weights", param="model.path")
            files = checked
    from llmd.config.resolve import resolve_args

    threads = boot.args.model.threads
    try:
        resolved = resolve_args(new.args, files, threads=threads if isinstance(threads, int) else 1)
    except ConfigError as error:
        raise RequestError("\n".join(error.faults), param="config") from None
    open_ones = [key for key in _FILLED if value_of(new.args, key) in ("auto", None)]
    return replace(boot, args=overlay(boot.args, resolved, [*keys, *open_ones]), files=files, source=new)


async def _tell_or_undo(core: Core, old: Boot, changes: list[Change], keep: Keep) -> None:
    replies = await _tell(core, changes, keep)
    bad = next((reply for reply in replies if not reply.ok), None)
    if bad is None:
        return
    why = f"{bad.role}-{bad.rank}: {bad.message or bad.code}"
    if any(change.reload == "engine" for change in changes):
        # The new engine runs; one process that has not heard of the rest is asked again when it comes back.
        log.error("configuration: not told to %s", why)
        raise RequestError(f"the engine runs with the new values, but {why}", code="internal_error")
    log.error("configuration: going back to the old values: %s", why)
    await reload.replace_boot(core, old)
    await _tell(core, changes, lambda replies: None)
    raise RolledBack(f"{why}; the old values are back", code="internal_error")


async def _tell(core: Core, changes: list[Change], keep: Keep) -> list[RankReply]:
    """Give the values of the boot file to all whom they concern."""
    args = core.boot.args
    names = [*core.names("frontend"), *core.names("scheduler")]
    replies = await tell(core, names, "configure", {"args": msgspec.to_builtins(args)}, within=REPLY_TIMEOUT)
    by_hand = core.remembered.log_levels
    if any(change.key == "observability.log_level" for change in changes):
        by_hand.clear()
    replies.append(await _tell_supervisor(core, args))
    if not by_hand:
        level = args.observability.log_level
        logging.getLogger().setLevel(level.upper())
        replies += await tell(core, [*names, *core.names("detokenizer")], "log_level", {"level": level}, within=REPLY_TIMEOUT)
    keep(replies)
    return replies


async def _tell_supervisor(core: Core, args: ServerArgs) -> RankReply:
    level = core.remembered.log_levels.get("supervisor-0", args.observability.log_level)
    values = {"restart": args.supervision.restart, "log_level": level, **{name: value_of(args, key) for key, name in _SUPERVISORS.items()}}
    try:
        await core.supervisor.configure(values)
    except SupervisorAway as error:
        return RankReply(role="supervisor", rank=0, answered=False, ok=False, code="no_answer", message=str(error))
    return RankReply(role="supervisor", rank=0, answered=True, ok=True)
