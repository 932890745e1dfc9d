"""Forget all cached prefixes. Refused while requests run (exit 75), unless --wait or --timeout says how long to wait for them."""

from __future__ import annotations

from llmctl.context import Context
from llmctl.output import counted


def run(context: Context) -> int:
    reply = context.change("/v1/flush", {}, waits=True)
    freed = ((reply or {}).get("data") or {}).get("pages_freed", 0)
    return context.report(reply, f"flushed: {counted(int(freed), 'page')} freed")
