"""Stop the daemon: running requests finish within http.drain_timeout. Waits until it has ended, for --timeout at most (120 s)."""

from __future__ import annotations

import time

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError

PATIENCE = 120.0


def run(context: Context) -> int:
    place = context.client.place
    pid = place.pid
    began = time.monotonic()
    try:
        reply = context.change("/v1/stop", {})
    except CtlError as error:
        # The answer may be lost with the process that gives it.
        if error.status != exits.LOST or pid is None:
            raise
        reply = {"state": "succeeded"}
    if reply is None or context.options.leave or pid is None:
        return context.report(reply, "stopping")
    limit = (context.options.timeout or PATIENCE) - (time.monotonic() - began)
    context.wait(f"llmd (pid {pid}) has ended", lambda: place.pid != pid, limit)
    return context.report(reply, f"stopped (pid {pid})")
