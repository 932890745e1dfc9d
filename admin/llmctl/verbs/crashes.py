"""Show which processes have ended though nobody wanted it, newest first; with an ID (or its beginning), all that is known of one: stacks, last lines.

The records are STATE/crashes/*.json, the newest 50; they hold no prompts. OOM says that the kernel killed processes for want of memory meanwhile.
Times are UTC. Where llmd is not running they are read from there, and a note on stderr says so.
"""

from __future__ import annotations

from typing import Any

from llmctl import exits, statefiles
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import one_line, when


def run(context: Context) -> int:
    options = context.options
    records = statefiles.newest(context, "crashes", 10_000 if options.id else options.lines)
    if options.id:
        return _one(context, [record for record in records if str(record.get("id", "")).startswith(options.id)])
    if not context.out.is_table:
        context.out.data(records)
        return exits.OK
    columns = ["ID", "TIME", "PROCESS", "HOW", "WHY", "DOING", "UPTIME", *(["EPOCH", "PID", "WEIGHTS"] if context.out.is_wide else [])]
    context.out.table(columns, [_row(record, context.out.is_wide) for record in records])
    context.note_none(records)
    return exits.OK


def _row(record: dict[str, Any], wide: bool) -> list[Any]:
    how = f"{record.get('how')}{' (out of memory)' if record.get('oom') else ''}"
    why = record.get("why") or next(iter(reversed(record.get("last_lines") or [])), "")
    cells = [record.get("id"), when(record.get("at") or 0), record.get("process"), how, one_line(why)[:60], record.get("phase"), f"{record.get('uptime_s')} s"]
    return [*cells, *([record.get("epoch"), record.get("pid"), record.get("weights_version")] if wide else [])]


def _one(context: Context, found: list[dict[str, Any]]) -> int:
    if len(found) != 1:
        raise CtlError(exits.FAILED, f"{len(found)} crashes have an id that begins so; `llmctl crashes` lists them")
    if not context.out.is_table:
        context.out.data(found[0])
        return exits.OK
    record = found[0]
    for name, value in record.items():
        if not isinstance(value, list):
            context.out.line(f"{name + ':':18}{when(value) if name == 'at' else value}")
    for name in ("last_lines", "stacks"):
        context.out.line(f"{name}:")
        for line in record.get(name) or ["none"]:
            context.out.line(f"  {one_line(line)}")
    return exits.OK
