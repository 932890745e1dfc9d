"""Take no new requests until `resume`; running ones finish. With --wait, or --timeout, wait for them (exit 124 if some are left then)."""

from __future__ import annotations

from llmctl.context import Context


def run(context: Context) -> int:
    reply = context.change("/v1/drain", {}, waits=True)
    done = "drained: nothing runs" if context.options.timeout or context.options.wait else "draining: new requests are refused"
    return context.report(reply, f"{done}; `llmctl resume` ends it")
