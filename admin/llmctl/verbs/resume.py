"""End a drain: take requests again."""

from __future__ import annotations

from llmctl.context import Context


def run(context: Context) -> int:
    return context.report(context.change("/v1/resume", {}), "resumed: requests are taken again")
