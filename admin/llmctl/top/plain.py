"""`llmctl top --once`: the overview as plain text, for a pipe, a ticket or a screen reader."""

from __future__ import annotations

from typing import Any

from llmctl.output import Output, bar
from llmctl.top import words
from llmctl.top.feed import Feed
from llmctl.verbs._answers import process_rows


def show(out: Output, feed: Feed) -> None:
    """Write what the feed has seen. One look has no last minute: percentiles are those since the start."""
    picture = feed.picture
    status = picture.status
    first_token, gap = feed.since_start()
    requests, throughput, kv = status.get("requests") or {}, status.get("throughput") or {}, status.get("kv") or {}
    total = kv.get("pages_total") or 0
    used = total - (kv.get("pages_free") or 0)
    out.facts(
        [
            ("state", out.state(words.state(picture)) + f"  ({words.reason(picture)})"),
            ("do", words.advice(picture)),
            ("serves", words.identity(status)),
            ("life", words.life(status)),
            ("tokens/s", f"{words.number(throughput.get('generation_tokens_s'))} out, {words.number(throughput.get('prompt_tokens_s'))} in" if status else ""),
            ("first token", _times(first_token)),
            ("between tokens", _times(gap)),
            ("requests", f"{requests.get('running')} running, {requests.get('waiting')} waiting" if status else ""),
            ("kv cache", f"{bar(used, total)} {kv.get('pages_active')} active, {kv.get('pages_cached')} cached, {kv.get('pages_free')} free" if total else ""),
        ]
    )
    if status.get("processes"):
        out.line()
        out.table(*process_rows(status["processes"], wide=False), frozenset({"RANK", "PID", "RESTARTS", "UPTIME", "MEMORY"}))


def _times(values: tuple[float | None, ...]) -> str:
    known = [f"{name} {text}" for name, text in words.percentiles(values) if text != "–"]
    return f"{', '.join(known)} since the start" if known else ""


def data(feed: Feed) -> dict[str, Any]:
    """The same for programs."""
    first_token, gap = feed.since_start()
    names = ("p50_s", "p90_s", "p99_s")
    picture = feed.picture
    return {
        "state": words.state(picture),
        "reason": words.reason(picture),
        "do": words.advice(picture),
        "first_token": dict(zip(names, first_token, strict=True)),
        "between_tokens": dict(zip(names, gap, strict=True)),
        "status": picture.status,
    }
