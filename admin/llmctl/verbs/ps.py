"""List the processes: role, rank, pid, state, restarts, memory.

RESTARTS counts starts after an end that nobody wanted (a crash, a hang). `-o wide` adds REPLACED (starts after a restart or reload that was asked for),
the age of the last heartbeat, and the incarnation, which counts all starts.
"""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.verbs._answers import PROCESS_NUMBERS, process_rows


def run(context: Context) -> int:
    return context.watch(lambda: _show(context))


def _show(context: Context) -> int:
    reply = context.get("/v1/processes")
    processes = reply.get("processes", []) if isinstance(reply, dict) else reply
    if context.out.is_table:
        columns, rows = process_rows(processes, context.out.is_wide)
        context.out.table(columns, rows, PROCESS_NUMBERS)
    else:
        context.out.data(processes)
    return exits.OK
