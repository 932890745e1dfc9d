"""Show the KV cache: pages that are active, cached and free."""

from __future__ import annotations

import argparse

from llmctl import exits
from llmctl.context import Context
from llmctl.output import bar


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(context: Context) -> int:
    kv = context.get("/v1/kv")
    if not context.out.is_table:
        context.out.data(kv)
        return exits.OK
    total, size = kv.get("pages_total") or 0, kv.get("page_size") or 0
    states = [(name, kv.get(f"pages_{name}") or 0) for name in ("active", "cached", "free")]
    rows = [[name, pages, pages * size, bar(pages, total)] for name, pages in states]
    context.out.table(["PAGES", "COUNT", "TOKENS", "SHARE"], [*rows, ["total", total, total * size, ""]], frozenset({"COUNT", "TOKENS"}))
    return exits.OK
