"""End requests: `abort RID` the one of that id, `--client-id X` those that carry it as X-Request-Id, `--all` every one.

Their clients get the error `aborted`: status 409, or the last event of a stream. Ids match exactly; exit 1 if nothing in flight has it.
"""

from __future__ import annotations

import argparse

from llmctl.context import Context
from llmctl.output import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("rid", nargs="?", metavar="RID", help="llmd's own id of the request: `id` in the answer, X-Llmd-Rid, `rid` in the log")
    which.add_argument("--client-id", metavar="X", help="the X-Request-Id that the client sent")
    which.add_argument("--all", action="store_true", help="all requests that run or wait")


def run(context: Context) -> int:
    options = context.options
    if options.all:
        body = {"all": True}
    elif options.client_id is not None:
        body = {"client_id": options.client_id}
    else:
        body = {"rid": options.rid}
    reply = context.change("/v1/abort", body)
    aborted = (reply.get("data") or {}).get("aborted", [])
    return context.report(reply, f"aborted: {counted(len(aborted), 'request')}")
