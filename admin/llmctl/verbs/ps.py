"""List the processes: role, rank, pid, state, restarts, memory. `-o wide` adds heartbeat and incarnation."""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.verbs._answers import process_rows


def run(context: Context) -> int:
    return context.watch(lambda: _show(context))


def _show(context: Context) -> int:
    reply = context.get("/v1/processes")
    processes = reply.get("processes", []) if isinstance(reply, dict) else reply
    if context.out.is_table:
        columns, rows = process_rows(processes, context.out.is_wide)
        context.out.table(columns, rows, frozenset({"RANK", "PID", "RESTARTS", "UPTIME", "MEMORY", "HEARTBEAT", "INCARNATION"}))
    else:
        context.out.data(processes)
    return exits.OK
