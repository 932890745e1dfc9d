"""Show the KV cache: pages that are active, cached and free, the prefix cache's hit rate, its biggest prefixes, and which requests hold most.

A prefix is a run of tokens that was computed once and is known; its NAME tells nothing of them. FROM is how many tokens come before it, BELOW how many pages
continue it, USERS how many running requests use it.
"""

from __future__ import annotations

from typing import Any

from llmctl import exits
from llmctl.context import Context
from llmctl.output import bar, duration


def run(context: Context) -> int:
    return context.watch(lambda: _show(context))


def _show(context: Context) -> int:
    kv = context.get("/v1/kv")
    out = context.out
    if not out.is_table:
        out.data(kv)
        return exits.OK
    total, size = kv.get("pages_total") or 0, kv.get("page_size") or 0
    states = [(name, kv.get(f"pages_{name}") or 0) for name in ("active", "cached", "free")]
    rows = [[name, pages, pages * size, bar(pages, total)] for name, pages in states]
    out.table(["PAGES", "COUNT", "TOKENS", "SHARE"], [*rows, ["total", total, total * size, ""]], frozenset({"COUNT", "TOKENS"}))
    _cache(context, kv)
    return exits.OK


def _cache(context: Context, kv: dict[str, Any]) -> None:
    out, cache = context.out, kv.get("prefix_cache") or {}
    if cache.get("hit_rate") is not None:
        out.line(f"\nprefix cache: {cache['hit_rate']:.1%} of {cache['queried_tokens']} prompt tokens were known, since the start")
    prefixes = (kv.get("prefixes") or [])[: None if out.is_wide else 8]
    if prefixes:
        out.line()
        columns = ["PREFIX", "FROM", "TOKENS", "PAGES", "BELOW", "HITS", "USERS"]
        out.table(columns, [[p["name"], p["start"], p["tokens"], p["pages"], p["below"], p["hits"], p["users"]] for p in prefixes], frozenset(columns[1:]))
    holders = (kv.get("holders") or [])[: None if out.is_wide else 8]
    if holders:
        out.line()
        columns = ["HOLDER", "CLIENT ID", "PHASE", "AGE", "PAGES"]
        out.table(columns, [[h["rid"], h["client_id"], h["phase"], duration(h["age_s"]), h["pages"]] for h in holders], frozenset({"AGE", "PAGES"}))
