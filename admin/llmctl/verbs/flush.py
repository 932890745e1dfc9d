"""Forget all cached prefixes. Refused while requests run (exit 75), unless --timeout says how long to wait for them."""

from __future__ import annotations

import argparse

from llmctl.context import Context
from llmctl.output import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(context: Context) -> int:
    reply = context.change("/v1/flush", {}, waits=True)
    freed = (reply.get("data") or {}).get("pages_freed", reply.get("pages_freed", 0))
    return context.report(reply, f"flushed: {counted(int(freed), 'page')} freed")
