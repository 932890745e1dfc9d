"""Show who changed what, when, why and how it ended, newest first; refused changes too. Times are UTC.

USER is who had logged in (loginuid) where the kernel knows, else whose process it was; both stand in `-o json`. Changes by a signal have no user.
The file is STATE/audit.jsonl, 8 MiB and four older ones. Where llmd is not running it is read from there, and a note on stderr says so.
"""

from __future__ import annotations

import pwd
from typing import Any

from llmctl import exits, statefiles
from llmctl.context import Context


def run(context: Context) -> int:
    options = context.options
    lines = statefiles.newest(context, "audit", 10_000 if options.verb_name else options.lines)
    shown = [line for line in lines if options.verb_name in (None, line.get("verb"))][: options.lines]
    if not context.out.is_table:
        context.out.data(shown)
        return exits.OK
    columns = ["TIME", "USER", "VERB", "RESULT", "PARAMETERS", "REASON", *(["PID", "OPERATION"] if context.out.is_wide else [])]
    context.out.table(columns, [_row(line, context.out.is_wide) for line in shown])
    context.note_none(shown)
    return exits.OK


def _row(line: dict[str, Any], wide: bool) -> list[Any]:
    result = line.get("result")
    code = line.get("code")
    parameters = " ".join(f"{name}={value}" for name, value in (line.get("params") or {}).items())
    cells = [line.get("ts"), _user(line), line.get("verb"), f"{result} ({code})" if code else result, parameters, line.get("reason")]
    return [*cells, *([line.get("pid"), line.get("operation_id")] if wide else [])]


def _user(line: dict[str, Any]) -> str:
    if line.get("key"):
        return f"key {line['key']}"
    number = line.get("loginuid") if line.get("loginuid") is not None else line.get("uid")
    if number is None:
        return "-"
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return str(number)
