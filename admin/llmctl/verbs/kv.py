"""Show the KV cache: pages that are active, cached and free, the prefix cache's hit rate, its biggest prefixes, and which requests hold most.

A prefix is a run of tokens that was computed once and is known; its NAME tells nothing of them. FROM is how many tokens come before it, BELOW how many pages
continue it, USERS how many running requests use it.

`-o wide` shows all prefixes and holders that there is word of and not only the first eight, how large pages are, the numbers behind the hit rate, how often a
request had to step back because pages ran out (a number that grows says that the cache is small), what each holder has read from the cache (CACHED), written
so far (TOKENS) and may still write (LIMIT), and the engine's RANK.
"""

from __future__ import annotations

from typing import Any, Final

from llmctl import exits
from llmctl.context import Context
from llmctl.output import bar, counted, duration, size

#: Prefixes and holders that are shown unless asked for more.
FEW: Final = 8


def run(context: Context) -> int:
    return context.watch(lambda: _show(context))


def _show(context: Context) -> int:
    kv = context.get("/v1/kv")
    out = context.out
    if not out.is_table:
        out.data(kv)
        return exits.OK
    total, page = kv.get("pages_total") or 0, kv.get("page_size") or 0
    states = [(name, kv.get(f"pages_{name}") or 0) for name in ("active", "cached", "free")]
    rows = [[name, pages, pages * page, bar(pages, total)] for name, pages in states]
    out.table(["PAGES", "COUNT", "TOKENS", "SHARE"], [*rows, ["total", total, total * page, ""]], frozenset({"COUNT", "TOKENS"}))
    out.line()
    if out.is_wide:
        _facts(context, kv)
    else:
        _hit_rate(context, kv)
    _prefixes(context, kv)
    _holders(context, kv)
    return exits.OK


def _hit_rate(context: Context, kv: dict[str, Any]) -> None:
    cache = kv.get("prefix_cache") or {}
    if cache.get("hit_rate") is not None:
        context.out.line(f"prefix cache: {cache['hit_rate']:.1%} of {counted(cache['queried_tokens'], 'prompt token')} were known, since the start")


def _facts(context: Context, kv: dict[str, Any]) -> None:
    cache, total = kv.get("prefix_cache") or {}, kv.get("bytes_total") or 0
    rate = f"{cache['hit_rate']:.1%}: {cache['hit_tokens']} of {counted(cache['queried_tokens'], 'prompt token')} since the start"
    each = f", {size(total / kv['pages_total'])} each" if total and kv.get("pages_total") else ""
    context.out.facts(
        [
            ("page", f"{kv.get('page_size')} tokens{each}{f', {size(total)} in all' if total else ''}"),
            ("hit rate", rate if cache.get("hit_rate") is not None else "no prompt has been looked up yet"),
            ("prefixes", f"{kv.get('prefixes_total', 0)} known"),
            ("stepped back", f"{counted(kv.get('retracted') or 0, 'time')} since the start, because pages ran out"),
            ("as of", f"{duration(kv['age_s'])} ago" if kv.get("age_s") is not None else ""),
        ]
    )


def _prefixes(context: Context, kv: dict[str, Any]) -> None:
    found, wide = kv.get("prefixes") or [], context.out.is_wide
    if not found:
        return
    context.out.line()
    columns = ["PREFIX", "FROM", "TOKENS", "PAGES", "BELOW", "HITS", "USERS", *(["RANK"] if wide else [])]
    names = ("name", "start", "tokens", "pages", "below", "hits", "users", *(("rank",) if wide else ()))
    context.out.table(columns, [[prefix.get(name) for name in names] for prefix in found[: None if wide else FEW]], frozenset(columns[1:]))


def _holders(context: Context, kv: dict[str, Any]) -> None:
    found, wide = kv.get("holders") or [], context.out.is_wide
    if not found:
        return
    context.out.line()
    columns = ["HOLDER", "CLIENT ID", "PHASE", "AGE", "PAGES", *(["PROMPT", "CACHED", "TOKENS", "LIMIT", "RANK"] if wide else [])]
    more = ("prompt_tokens", "cached_tokens", "output_tokens", "max_new_tokens", "rank") if wide else ()
    rows = [
        [holder["rid"], holder["client_id"], holder["phase"], duration(holder["age_s"]), holder["pages"], *(holder.get(name) for name in more)]
        for holder in found[: None if wide else FEW]
    ]
    context.out.table(columns, rows, frozenset(columns[3:]))
