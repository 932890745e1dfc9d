"""What each administrative verb takes and does: flush, drain, resume, abort, stop, restart, log-level. Reload has a file of its own.

A verb runs inside an operation, after its planner (llmd.control.plans) has found nothing against it: it hands the ranks' replies to
`keep` and returns what the operation's `data` shows, or raises RequestError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmd.control import drain as draining
from llmd.control.asking import ask, tell
from llmd.control.channel import RankReply
from llmd.control.core import Core
from llmd.control.engine import await_recovery, engine_results, last_deaths
from llmd.control.state_file import Began
from llmd.errors import RequestError

Keep = Callable[[list[RankReply]], None]
Seconds = Annotated[float, Meta(ge=0, le=86400)]

#: Seconds a rank may take to answer one command.
REPLY_TIMEOUT = 5.0

#: Seconds between two tries of a flush that waits for work to end.
FLUSH_EVERY = 0.1


class _Params(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class FlushParams(_Params, frozen=True):
    """Forget all cached prefixes. With `timeout_s`, wait that long for running work to end; new requests go on being admitted."""

    timeout_s: Seconds | None = None


class DrainParams(_Params, frozen=True):
    """Take no new requests until `resume`. With `timeout_s`, wait that long for running ones to finish."""

    timeout_s: Seconds | None = None


class ResumeParams(_Params, frozen=True):
    """End a drain."""


class AbortParams(_Params, frozen=True):
    """End requests: the one of this `rid`, those of this `client_id` (X-Request-Id), or all. Exactly one of the three; ids match exactly."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    client_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    all: bool = False


class StopParams(_Params, frozen=True):
    """Stop the daemon as `systemctl stop` does."""


class RestartParams(_Params, frozen=True):
    """Restart the engine, with requests held. Target `daemon`: stop llmd as a whole, then start it anew with the configuration as it is then."""

    target: Literal["engine", "daemon"] = "engine"
    timeout_s: Seconds | None = None


class ReloadParams(_Params, frozen=True):
    """Load other weights of the same shape. Mode drain lets running requests finish first, for `timeout_s` at most."""

    path: str
    version: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    mode: Literal["drain", "abort", "now"] | None = None
    timeout_s: Seconds | None = None


class LogLevelParams(_Params, frozen=True):
    """Set the least severe level that is logged, of all processes, those of a role (`scheduler`), or one (`scheduler-0`), until they restart.

    Without `level`, or with `default`: what the configuration says."""

    level: Literal["debug", "info", "warning", "error", "default"] | None = None
    process: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ConfigReloadParams(_Params, frozen=True):
    """Read the configuration again, and take what has changed: all of it, or none."""

    timeout_s: Seconds | None = None


class LoraParams(_Params, frozen=True):
    """Load or unload an adapter."""

    name: str = ""
    path: str | None = None


VERBS: dict[str, type[Struct]] = {
    "flush": FlushParams,
    "reload": ReloadParams,
    "drain": DrainParams,
    "resume": ResumeParams,
    "abort": AbortParams,
    "stop": StopParams,
    "restart": RestartParams,
    "config/reload": ConfigReloadParams,
    "log-level": LogLevelParams,
    "lora/load": LoraParams,
    "lora/unload": LoraParams,
}


def refuse_unless_up(core: Core) -> None:
    """Raise 503 with the reason where there is no engine to do it."""
    if core.never_ready:
        raise RequestError(f"the daemon is {core.machine.state}", code="loading")
    if core.stopping:
        raise RequestError("the daemon stops", code="shutting_down")
    if not core.engine_up:
        raise RequestError(f"the engine is away: {core.machine.reason}", code="engine_unavailable")


def refuse_unless_begun(core: Core) -> None:
    """Raise 503 with the reason before the first readiness, and in a stop."""
    if core.stopping:
        raise RequestError("the daemon stops", code="shutting_down")
    if core.never_ready:
        raise RequestError(f"the daemon is {core.machine.state}", code="loading")


def named_processes(core: Core, name: str | None) -> list[str]:
    """Processes of the plan that `name` means: all, those of a role, or one; the supervisor too. Raises RequestError."""
    names = ["supervisor-0", *(spec.name for spec in core.boot.processes)]
    chosen = [n for n in names if name is None or n == name or n.rpartition("-")[0] == name]
    if not chosen:
        raise RequestError(f"there is no process {name!r}; there are {', '.join(names)}", param="process")
    return chosen


async def flush(core: Core, params: FlushParams, keep: Keep, began: Began | None = None) -> dict[str, Any]:
    """Ask the schedulers until none of them is busy, or away. `began`: an earlier control has begun this, and its time counts."""
    deadline = (began.at if began else time.monotonic()) + (params.timeout_s or 0.0)
    while True:
        replies = await ask(core, "scheduler", "flush", within=REPLY_TIMEOUT)
        keep(replies)
        busy, away = [r for r in replies if r.code == "busy"], [r for r in replies if not r.answered]
        if not busy and not away:
            _all_must_succeed(replies)
            return {"pages_freed": sum(int(r.data.get("pages_freed", 0)) for r in replies)}
        if not params.timeout_s:
            _all_must_succeed(away)
            error = RequestError(f"the cache is in use: requests {_counts(busy)}", code="busy")
            error.hint = "llmctl flush --timeout 30s (timeout_s in the API) waits for them"
            raise error
        if time.monotonic() >= deadline:
            why = f"{away[0].role}-{away[0].rank} is away" if away else f"the cache is still in use: requests {_counts(busy)}"
            raise RequestError(f"{why}, after {params.timeout_s:g} s", code="timeout")
        if away:
            await core.until(lambda: core.engine_up, deadline)
        await asyncio.sleep(min(FLUSH_EVERY, max(0.0, deadline - time.monotonic())))


def _counts(busy: list[RankReply]) -> str:
    running, waiting = (sum(int(r.data.get(name, 0)) for r in busy) for name in ("running", "waiting"))
    return f"{running} running, {waiting} waiting"


async def drain(core: Core, params: DrainParams, keep: Keep, began: Began | None = None) -> dict[str, Any]:
    """Drain the frontends; the state stays `draining` until `resume`. `began`: an earlier control has begun this, and its time counts."""
    if core.machine.state != "draining":
        core.machine.fire("drain", "asked to")
    core.holding = True
    replies = await tell(core, core.names("frontend"), "drain", within=REPLY_TIMEOUT)
    keep(replies)
    _all_must_succeed(replies)
    if not params.timeout_s:
        return {}
    left = await draining.drain(core, (began.at if began else time.monotonic()) + params.timeout_s)
    if core.machine.state != "draining" or not core.holding:
        raise RequestError("the drain has been ended", code="aborted")
    if left:
        raise RequestError(f"{draining.unfinished(left)} within {params.timeout_s:g} s; the drain goes on", code="timeout")
    return {"left": 0}


async def resume(core: Core, params: ResumeParams, keep: Keep) -> dict[str, Any]:
    """Take requests again."""
    replies = await draining.resume(core)
    keep(replies)
    if core.machine.can("resume"):
        core.machine.fire("resume", "asked to")
    _all_must_succeed(replies)
    return {}


async def abort(core: Core, params: AbortParams, keep: Keep) -> dict[str, Any]:
    """Tell the frontends, who own the requests; each of these gets the error `aborted`."""
    choice = {"rid": params.rid or "", "client_id": params.client_id or "", "everything": params.all}
    replies = await tell(core, core.names("frontend"), "abort", choice, within=REPLY_TIMEOUT)  # who is away has no requests
    keep(replies)
    aborted = [rid for reply in replies for rid in reply.data.get("aborted", [])]
    if params.rid is None or not aborted:  # a rid is one frontend's; whoever else does not answer has nothing to do with it
        _all_must_succeed(replies)
    if not aborted and not params.all:
        raise RequestError("no request in flight has this id", code="not_found", param="rid" if params.rid is not None else "client_id")
    return {"aborted": aborted}


async def stop(core: Core, params: StopParams, keep: Keep) -> dict[str, Any]:
    """Begin the stop; the answer comes before it ends."""
    assert core.snapshot is not None, "planned"
    core.supervisor.terminate(core.snapshot.pid)
    return {"stopping": True}


async def restart(core: Core, params: RestartParams, keep: Keep, began: Began | None = None) -> dict[str, Any]:
    """Restart the engine group and wait until it is up, however often it dies meanwhile: where it does not get up at all, llmd ends.

    `began`: an earlier control has begun this, and may have asked for it."""
    if params.target == "daemon":
        await core.supervisor.restart_all()
        return {"stopping": True}
    timeout = params.timeout_s if params.timeout_s is not None else core.boot.args.supervision.startup_timeout
    deadline = (began.at if began else time.monotonic()) + timeout
    if began is not None and core.epoch > began.epoch:
        before = began.epoch
    else:
        before = max(core.epoch, await core.supervisor.restart_engine("restart"))
    fault = await await_recovery(core, before, deadline)
    keep(engine_results(core))
    died = last_deaths(core) if core.epoch > before + 1 else ""
    if fault:
        error = RequestError(f"the engine has not come back: {fault}{f'; {died}' if died else ''}", code="shutting_down" if core.stopping else "timeout")
        error.hint = "" if core.stopping else "it goes on being started, as its budget allows: llmctl status, llmctl crashes"
        raise error
    return {"epoch": core.epoch, **({"died_meanwhile": died} if died else {})}


def wanted_level(core: Core, params: LogLevelParams) -> str:
    """The level that is asked for, be it the configured one."""
    return params.level if params.level not in (None, "default") else core.boot.args.observability.log_level


async def log_level(core: Core, params: LogLevelParams, keep: Keep) -> dict[str, Any]:
    """Tell each process, and remember it for those that start later."""
    level, names = wanted_level(core, params), named_processes(core, params.process)
    for name in names:
        core.remembered.log_levels.pop(name, None)
        if params.level not in (None, "default"):
            core.remembered.log_levels[name] = level
    replies = await tell(core, [n for n in names if n not in ("control-0", "supervisor-0")], "log_level", {"level": level}, within=REPLY_TIMEOUT)
    if "control-0" in names:
        logging.getLogger().setLevel(level.upper())
        replies.append(RankReply(role="control", rank=0, answered=True, ok=True))
    if "supervisor-0" in names:
        await core.supervisor.configure({"log_level": level})
        replies.append(RankReply(role="supervisor", rank=0, answered=True, ok=True))
    keep(replies)
    _all_must_succeed(replies)
    return {"level": level, "processes": names}


#: verb -> what it does; those with more to it are run by the operations themselves.
RUN: dict[str, Callable[[Core, Any, Keep], Awaitable[dict[str, Any]]]] = {
    "flush": flush,
    "drain": drain,
    "resume": resume,
    "abort": abort,
    "stop": stop,
    "restart": restart,
    "log-level": log_level,
}


def _all_must_succeed(replies: list[RankReply]) -> None:
    bad = next((r for r in replies if not r.ok), None)
    if bad is not None:
        code = "internal_error" if bad.answered else "engine_unavailable"
        raise RequestError(f"{bad.role}-{bad.rank}: {bad.message or bad.code}", code=code)
