"""End requests: `abort RID` the one of that id, `--client-id X` those that carry it as X-Request-Id, `--all` every one.

Their clients get the error `aborted`: status 409, or the last event of a stream. Ids match exactly; exit 1 if nothing in flight has it.
"""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import counted


def run(context: Context) -> int:
    options = context.options
    if not options.all and "" in (options.client_id, options.rid):
        raise CtlError(exits.BAD_INPUT, "an empty id aborts nothing", "`llmctl requests` shows the ids in flight")
    if options.all:
        body = {"all": True}
    elif options.client_id is not None:
        body = {"client_id": options.client_id}
    else:
        body = {"rid": options.rid}
    reply = context.change("/v1/abort", body)
    aborted = ((reply or {}).get("data") or {}).get("aborted", [])
    return context.report(reply, f"aborted: {counted(len(aborted), 'request')}")
