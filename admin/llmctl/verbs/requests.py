"""List the requests in flight: who they are, how old, where they stand, what they have got so far.

PHASE: `submitted` (sent to the engine), `waiting` (in its queue), `prefill` (its prompt is computed), `decode` (it generates), `held` (the engine is
away). TOK/S counts from the first token on; SILENT is the time since the last one. PAGES are KV pages. `-o wide` adds the parts.
"""

from __future__ import annotations

from typing import Any, Final

from llmctl import exits
from llmctl.context import Context
from llmctl.output import counted, duration

_SORT: Final = {"age": "age_s", "tokens": "output_tokens", "rate": "tokens_s", "pages": "pages", "prompt": "prompt_tokens"}


def run(context: Context) -> int:
    return context.watch(lambda: _show(context))


def _show(context: Context) -> int:
    options = context.options
    answer = context.get("/v1/requests")
    rows = [row for row in answer.get("requests", []) if _wanted(options, row)]
    rows.sort(key=lambda row: row.get(_SORT[options.sort]) or 0, reverse=True)
    shown = rows[: options.lines]
    if not context.out.is_table:
        context.out.data({**answer, "requests": shown})
        return exits.OK
    wide = context.out.is_wide
    columns = ["RID", "CLIENT ID", "PHASE", "AGE", "PROMPT", "TOKENS", "TOK/S", "SILENT", "PAGES"]
    columns += ["QUEUED", "FIRST TOKEN", "CACHED", "LIMIT", "PRIORITY", "FRONTEND", "RANK"] if wide else []
    context.out.table(columns, [_row(row, wide) for row in shown], frozenset(columns[3:]))
    context.note_none(shown)
    total = answer.get("total", len(rows))
    if total > len(shown):
        context.note(f"{len(shown)} of {counted(total, 'request')}{_rest(options, len(rows) > len(shown))}")
    return exits.OK


def _rest(options: Any, cut: bool) -> str:
    """Why the others are not shown."""
    chosen = [f"{name} {value}" for name, value in (("--phase", options.phase), ("--client-id", options.client_id)) if value is not None]
    why = f"; the others are not {' '.join(chosen)}" if chosen and not cut else "; -n N shows more"
    return f"{why} (CLIENT ID is the X-Request-Id that the client sent)" if options.client_id is not None and not cut else why


def _wanted(options: Any, row: dict[str, Any]) -> bool:
    return (options.phase is None or row["phase"] == options.phase) and (options.client_id is None or row["client_id"] == options.client_id)


def _row(row: dict[str, Any], wide: bool) -> list[Any]:
    cells = [row["rid"], row["client_id"], row["phase"], duration(row["age_s"]), row["prompt_tokens"], row["output_tokens"], row["tokens_s"]]
    cells += [duration(row["silent_s"]), row["pages"]]
    if wide:
        cells += [duration(row["waited_s"]), duration(row["first_token_s"]), row["cached_tokens"], row["max_new_tokens"], row["priority"]]
        cells += [row["frontend"], row["rank"]]
    return cells
