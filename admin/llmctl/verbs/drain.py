"""Take no new requests until `resume`; running ones finish. With --timeout, wait that long for them (exit 124 if some are left)."""

from __future__ import annotations

import argparse

from llmctl.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(context: Context) -> int:
    reply = context.change("/v1/drain", {}, waits=True)
    done = "drained: nothing runs" if context.options.timeout else "draining: new requests are refused"
    return context.report(reply, f"{done}; `llmctl resume` ends it")
