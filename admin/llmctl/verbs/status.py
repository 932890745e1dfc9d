"""Show what llmd does: state, processes, requests, KV cache. Answers in under 3 s, whatever state llmd is in.

Exit status: 0 ready, 1 up but not ready, 3 not running, 4 running but not answering. The JSON has the same keys in all four.
In 3 the state is `stopped` (as asked), `failed` (it gave up and said why) or `died` (it was killed or the machine went down).
"""

from __future__ import annotations

from typing import Any

from llmctl.context import Context
from llmctl.output import bar, duration
from llmctl.verbs._answers import PROCESS_NUMBERS, fetch, process_rows


def run(context: Context) -> int:
    return context.watch(lambda: _once(context))


def _once(context: Context) -> int:
    status, code, error = fetch(context)
    if not context.out.is_table:
        context.out.data(status)
    elif error is None:
        _show(context, status)
    else:
        _show_absent(context, status, error.message)
    if error is not None:
        context.note(f"llmctl: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
    return code


def _show(context: Context, status: dict[str, Any]) -> None:
    out = context.out
    stage, progress = status.get("stage"), status.get("progress")
    share = f" {progress:.0%}" if isinstance(progress, float) and 0 < progress < 1 else ""
    out.facts(
        [
            (
                "state",
                out.state(str(status.get("state"))) + (f"  {stage}{share}" if stage else "") + (f"  ({status['reason']})" if status.get("reason") else ""),
            ),
            ("degraded", out.paint(", ".join(map(str, status.get("degraded") or [])), "yellow")),
            ("model", _model(status)),
            ("address", str(status.get("http") or "")),
            ("uptime", duration(status.get("uptime_s")) + f", engine epoch {status.get('epoch')}"),
            ("requests", _requests(status)),
            ("kv cache", _kv(status)),
            ("failpoints", out.paint("armed: this is a test", "red") if status.get("failpoints") else ""),
        ]
    )
    out.line()
    columns, rows = process_rows(status.get("processes"), out.is_wide)
    out.table(columns, rows, PROCESS_NUMBERS)


def _show_absent(context: Context, status: dict[str, Any], said: str) -> None:
    out = context.out
    silent = status["running"] and status["state"] != "starting"
    answering = out.paint("not answering", "red") if silent else out.state(str(status["state"] or "unknown"))
    age = status["last_state_age_s"]
    last = f"{status['last_state']}, entered {duration(age)} ago" if status["last_state"] else ""
    # What is said on stderr is not said twice.
    reason = str(status["reason"] or "")
    rows = [("state", answering), ("last state", last), ("reason", "" if reason in said else reason), ("pid", str(status["pid"] or ""))]
    out.facts([*rows, ("looked at", "\n            ".join(status["looked_at"]))])


def _model(status: dict[str, Any]) -> str:
    version = status.get("weights_version")
    return f"{status.get('model') or '-'}" + (f"  (weights {version})" if version else "")


def _requests(status: dict[str, Any]) -> str:
    requests, throughput = status.get("requests") or {}, status.get("throughput") or {}
    speed = f"{throughput.get('generation_tokens_s') or 0:.1f} tokens/s out, {throughput.get('prompt_tokens_s') or 0:.1f} in"
    held = f", {requests['held']} held until the engine is back" if requests.get("held") else ""
    return f"{requests.get('running', 0)} running, {requests.get('waiting', 0)} waiting{held}; {speed}"


def _kv(status: dict[str, Any]) -> str:
    kv = status.get("kv") or {}
    total = kv.get("pages_total") or 0
    if not total:
        return ""
    used = total - (kv.get("pages_free") or 0)
    return f"{bar(used, total)} {used} of {total} pages ({kv.get('pages_active')} active, {kv.get('pages_cached')} cached)"
