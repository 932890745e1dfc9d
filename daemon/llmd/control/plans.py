"""verb -> its planner: what it would do now, or why it is refused. See llmd.control.plan; those that prepare something are beside their runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from llmd.control import config_reload, reload
from llmd.control.core import Core
from llmd.control.plan import Plan, cached_pages, dropped, in_flight, replaces_engine, rids
from llmd.control.verbs import (
    AbortParams,
    DrainParams,
    FlushParams,
    LogLevelParams,
    LoraParams,
    RestartParams,
    ResumeParams,
    StopParams,
    named_processes,
    refuse_unless_begun,
    refuse_unless_up,
    wanted_level,
)
from llmd.errors import RequestError


async def flush(core: Core, params: FlushParams) -> Plan:
    refuse_unless_up(core)
    rows = in_flight(core)
    wait = [f"wait up to {params.timeout_s:g} s for running requests to end"] if params.timeout_s and rows else []
    note = [] if params.timeout_s or not rows else [f"refused as long as requests run: now {len(rids(rows))}"]
    return Plan(steps=[*wait, *note, "forget all cached prefixes"], pages_forgotten=cached_pages(core), requests_finished=len(rids(rows)) if wait else 0)


async def drain(core: Core, params: DrainParams) -> Plan:
    if core.stopping:
        raise RequestError("the daemon stops", code="shutting_down")
    if core.machine.state != "draining" and not core.machine.can("drain"):
        raise RequestError(f"the daemon is {core.machine.state}", code="loading")
    rows = in_flight(core)
    wait = [f"wait up to {params.timeout_s:g} s for running requests to end"] if params.timeout_s else ["let running requests go on, and wait for none"]
    awaited = len(rids(rows)) if params.timeout_s else 0
    return Plan(steps=["refuse new requests (503 draining) until `resume`", *wait], requests_finished=awaited, requests=rids(rows))


async def resume(core: Core, params: ResumeParams) -> Plan:
    refuse_unless_begun(core)
    return Plan(steps=["take new requests"])


async def abort(core: Core, params: AbortParams) -> Plan:
    if sum([params.rid is not None, params.client_id is not None, params.all]) != 1:
        raise RequestError("give exactly one of rid, client_id and all", param="rid")

    def meant(row: dict[str, Any]) -> bool:
        return (
            params.all or (params.rid is not None and row["request"] == params.rid) or (params.client_id is not None and row["client_id"] == params.client_id)
        )

    rows = [row for row in in_flight(core) if meant(row)]
    steps = ["end them with the error `aborted`" if rows else "nothing: no request in flight matches"]
    return Plan(steps=steps, requests_aborted=len(rids(rows)), requests=rids(rows), tokens_dropped=dropped(rows))


async def stop(core: Core, params: StopParams) -> Plan:
    if core.snapshot is None:
        raise RequestError("the supervisor has not been heard yet", code="loading")
    rows, limit = in_flight(core), core.boot.args.http.drain_timeout
    steps = [f"refuse new requests, wait up to {limit:g} s for running ones", "end what is left with the error `shutting_down`", "stop all processes in order"]
    names = [spec.name for spec in core.boot.processes]
    return Plan(steps=steps, processes_stopped=names, requests_finished=len(rids(rows)), requests=rids(rows), downtime_s=None)


async def _restart_all(core: Core) -> Plan:
    """The new configuration is read now: one that would end the next start must not end this life."""
    source = core.boot.source
    if source is None:
        raise RequestError("this llmd was started by a program, which alone can start it again", status=409)
    await config_reload.read_again(core, source)
    made = await stop(core, StopParams())
    made.steps = [*made.steps, "start llmd anew with the configuration as it is then; new requests are refused until it is ready"]
    made.processes_restarted, made.processes_stopped = ["supervisor-0", *made.processes_stopped], []
    made.downtime_s = round(core.remembered.load_s, 1) if core.remembered.load_s is not None else None
    made.drains_first_s = core.boot.args.http.drain_timeout
    if core.snapshot is not None and core.snapshot.managed:
        made.refused = {
            "code": "busy",
            "message": "systemd runs this llmd, and restarts it",
            "hint": "systemctl restart llmd (`llmctl restart --all` does that)",
        }
    return made


async def restart(core: Core, params: RestartParams) -> Plan:
    refuse_unless_begun(core)
    if params.target == "daemon":
        return await _restart_all(core)
    return replaces_engine(core, aborts=False, first=[])


async def log_level(core: Core, params: LogLevelParams) -> Plan:
    names = named_processes(core, params.process)
    return Plan(steps=[f"log from {wanted_level(core, params)} on in {', '.join(names)}"], details={"processes": names})


async def lora(core: Core, params: LoraParams) -> Plan:
    raise RequestError("LoRA adapters are not there yet", status=501)


Planner = Callable[[Core, Any], Awaitable[Plan]]

PLAN: dict[str, Planner] = {
    "flush": flush,
    "reload": reload.plan,
    "drain": drain,
    "resume": resume,
    "abort": abort,
    "stop": stop,
    "restart": restart,
    "config/reload": config_reload.plan,
    "log-level": log_level,
    "lora/load": lora,
    "lora/unload": lora,
}
