"""Show which processes have ended though nobody wanted it, newest first; with an ID (or its beginning), all that is known of one: stacks, last lines.

WHAT says how it ended: by which signal or exit status and what that means, that it hung and how, or that the kernel killed processes for want of memory
meanwhile. LAST WORDS is the last thing that it logged, which need not have to do with it. The records are STATE/crashes/*.json, the newest 50; they hold
no prompts. Times are UTC. Where llmd is not running they are read from there, and a note on stderr says so.
"""

from __future__ import annotations

from typing import Any

from llmctl import exits, statefiles
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import duration, one_line, when
from llmctl.verbs._deaths import last_words, what

#: Characters of the last words in the table.
WORDS = 60


def run(context: Context) -> int:
    options = context.options
    records = statefiles.newest(context, "crashes", 10_000 if options.id else options.lines)
    if options.id:
        return _one(context, [record for record in records if str(record.get("id", "")).startswith(options.id)])
    if not context.out.is_table:
        context.out.data(records)
        return exits.OK
    wide = context.out.is_wide
    columns = ["ID", "TIME", "PROCESS", "WHAT", "DOING", "UPTIME", *(["EPOCH", "PID", "WEIGHTS"] if wide else []), "LAST WORDS"]
    context.out.table(columns, [_row(record, wide) for record in records])
    context.note_none(records)
    return exits.OK


def _row(record: dict[str, Any], wide: bool) -> list[Any]:
    cells = [record.get("id"), when(record.get("at")), record.get("process"), what(record), record.get("phase"), duration(record.get("uptime_s"))]
    cells += [record.get("epoch"), record.get("pid"), record.get("weights_version")] if wide else []
    words = one_line(last_words(record))
    return [*cells, words if wide or len(words) <= WORDS else f"{words[: WORDS - 3]}..."]


def _one(context: Context, found: list[dict[str, Any]]) -> int:
    if len(found) != 1:
        how_many = f"{len(found)} crashes have" if found else "no crash has"
        raise CtlError(exits.FAILED, f"{how_many} an id that begins with {context.options.id!r}", "llmctl crashes lists them")
    record = found[0]
    if not context.out.is_table:
        context.out.data(record)
        return exits.OK
    rows = [
        ("what", what(record)),
        ("last words", one_line(last_words(record)) if last_words(record) else ""),
        ("time", when(record.get("at"))),
        ("process", f"{record.get('process')} (pid {record.get('pid')}), up for {duration(record.get('uptime_s'))}"),
        ("doing", str(record.get("phase") or "")),
    ]
    shown = {"last_words", "at", "process", "pid", "uptime_s", "phase", "why"}
    rows += [(name.replace("_", " "), one_line(value)) for name, value in record.items() if name not in shown and not isinstance(value, list | dict)]
    context.out.facts(rows)
    for name in ("last_lines", "stacks"):
        context.out.line(f"\n{name.replace('_', ' ')}:")
        for line in record.get(name) or ["none"]:
            context.out.line(f"  {one_line(line)}")
    return exits.OK
