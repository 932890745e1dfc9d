"""Show who changed what, when, why and how it ended, newest first; refused changes too. Times are UTC.

WHAT is what was asked for, then what it changed, as `KEY: BEFORE -> AFTER` (of a change that failed: what it was to change), what came of it, and the
message of a failure. USER is who had logged in (loginuid) where the kernel knows, else whose process it was, or `key NAME` of who came over HTTP; all of
it stands in `-o json`. Changes by a signal have no user. `-o wide` adds the process, the address and the operation.
The file is STATE/audit.jsonl, 8 MiB and four older ones. Where llmd is not running it is read from there, and a note on stderr says so.
"""

from __future__ import annotations

import pwd
from typing import Any

from llmctl import exits, statefiles
from llmctl.context import Context
from llmctl.output import counted


def run(context: Context) -> int:
    options = context.options
    lines = statefiles.newest(context, "audit", 10_000 if options.verb_name else options.lines)
    shown = [line for line in lines if options.verb_name in (None, line.get("verb"))][: options.lines]
    if not context.out.is_table:
        context.out.data(shown)
        return exits.OK
    columns = ["TIME", "USER", "VERB", "RESULT", "REASON", *(["PID", "ADDRESS", "OPERATION"] if context.out.is_wide else []), "WHAT"]
    context.out.table(columns, [row for line in shown for row in _rows(line, context.out.is_wide)])
    context.note_none(shown)
    return exits.OK


def _rows(line: dict[str, Any], wide: bool) -> list[list[Any]]:
    """One row, and one more for each further thing that is to be said."""
    result, code = line.get("result"), line.get("code")
    cells = [line.get("ts"), _user(line), line.get("verb"), f"{result} ({code})" if code else result, line.get("reason")]
    cells += [line.get("pid"), line.get("address"), line.get("operation_id")] if wide else []
    first, *more = _said(line) or [""]
    return [[*cells, first], *([" "] * len(cells) + [text] for text in more)]


def _said(line: dict[str, Any]) -> list[str]:
    """What a line says beside who and when."""
    params, data = line.get("params") or {}, line.get("data") or {}
    said = [" ".join(f"{name}={_value(value)}" for name, value in params.items())]
    said += [f"{change['key']}: {change['before']} -> {change['after']}" for change in line.get("changes") or []]
    if "pages_freed" in data:
        said.append(f"{counted(data['pages_freed'], 'page')} freed")
    if "aborted" in data:
        said.append(f"aborted: {' '.join(map(str, data['aborted'])) or 'none'}")
    said += str(line.get("message") or "").splitlines()
    return [text for text in said if text]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
