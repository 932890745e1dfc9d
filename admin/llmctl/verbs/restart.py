"""Restart the engine and wait until it is ready again. Running requests pause and go on: no token is lost, doubled or changed.

`--all` restarts llmd as a whole, for keys of the configuration that need it: running requests finish within http.drain_timeout, new ones are refused, then
it starts anew with the configuration as it is then, which is read first: a fault in it is told, and nothing is done. Under systemd llmctl has
`systemctl restart` do it; elsewhere llmd starts itself anew, with the same pid and command line. Waits until it is ready (--timeout, 15 min).
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from llmctl import exits
from llmctl.context import CHANGE_TIMEOUT, PATIENCE, Context
from llmctl.exits import CtlError
from llmctl.find import Place
from llmctl.output import plan_lines


def run(context: Context) -> int:
    if context.options.all:
        return _all(context)
    reply = context.change("/v1/restart", {}, waits=True)
    data = (reply or {}).get("data") or {}
    died = data.get("died_meanwhile")
    return context.report(reply, f"restarted: engine epoch {data.get('epoch')}" + (f", after it had died once more: {died}" if died else ""))


def _all(context: Context) -> int:
    place = context.client.place
    before, began = place.lock.get("start_id"), time.monotonic()
    if place.pid is not None and (systemctl := _unit(place.pid)):
        return _by_systemd(context, systemctl)
    reply = context.change("/v1/restart", {"target": "daemon"})
    if reply is None or context.options.no_wait or reply.get("state") not in (None, "succeeded"):
        return context.report(reply, "restarting")
    context.wait("llmd is ready again", lambda: _ready_again(context, place, before), (context.options.timeout or PATIENCE) - (time.monotonic() - began))
    return context.report(reply, f"restarted: llmd (pid {place.pid})")


def _ready_again(context: Context, place: Place, before: object) -> bool:
    """Raises CtlError where it has ended instead."""
    if place.pid is None:
        raise CtlError(exits.FAILED, f"llmd has ended instead: {place.last_state.get('reason') or place.last_state.get('state')}", "llmctl doctor")
    if place.lock.get("start_id") == before:
        return False
    try:
        status = context.client.get("/v1/status", 2.0)
    except CtlError:
        return False
    return bool(status.get("state") == "ready" and status.get("start_id") != before)


def _by_systemd(context: Context, systemctl: list[str]) -> int:
    command = " ".join(systemctl)
    if context.options.dry_run:
        plan: dict[str, Any] = (context.client.post("/v1/stop", {"dry_run": True}, CHANGE_TIMEOUT) or {}).get("plan") or {}
        plan["steps"] = [*plan.get("steps", []), command]
        if context.out.is_table:
            for line in plan_lines(plan):
                context.out.line(line)
        else:
            context.out.data(plan)
        return exits.OK
    context.confirm("/v1/stop", {})
    done = subprocess.run([*systemctl[:-1], *(["--no-block"] if context.options.no_wait else []), systemctl[-1]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CtlError(exits.FAILED, f"{command}: {done.stderr.strip() or f'status {done.returncode}'}", "llmctl status; sudo, if you may not")
    context.out.line("restarting" if context.options.no_wait else "restarted")
    return exits.OK


def _unit(pid: int) -> list[str]:
    """`systemctl restart UNIT` where `pid` is the main process of a unit; empty where it is not."""
    try:
        path = Path(f"/proc/{pid}/cgroup").read_text().rpartition("::")[2].strip()
        unit = path.rpartition("/")[2]
        if not unit.endswith(".service"):
            return []
        systemctl = ["systemctl", *(["--user"] if "/user@" in path else [])]
        shown = subprocess.run([*systemctl, "show", "-p", "MainPID", "--value", unit], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [*systemctl, "restart", unit] if shown.stdout.strip() == str(pid) else []
