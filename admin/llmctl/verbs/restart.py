"""Restart the engine and wait until it is ready again. Running requests pause and go on: no token is lost, doubled or changed.

`--all` is the whole daemon: under systemd that is `systemctl restart llmd`, which llmctl does not do for you; elsewhere `llmctl stop`, then `llmd run`.
"""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError


def run(context: Context) -> int:
    if context.options.all:
        hint = "systemctl restart llmd; without systemd: llmctl stop, then llmd run"
        raise CtlError(exits.FAILED, "only what started llmd can start it again", hint)
    reply = context.change("/v1/restart", {}, waits=True)
    data = (reply or {}).get("data") or {}
    died = data.get("died_meanwhile")
    return context.report(reply, f"restarted: engine epoch {data.get('epoch')}" + (f", after it had died once more: {died}" if died else ""))
