"""`GET /v1/requests` and `GET /v1/kv`: the tables that came with the last heartbeats, put together. No process is asked.

A frontend knows for whom a request is and what has been delivered, a rank where it stands and which pages it holds; they meet by rid.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llmd.control import status
from llmd.control.core import Core
from llmd.control.table import Worker
from llmd.wire.tables import OwnedRequest, Prefix, ScheduledRequest

#: Requests that `/v1/kv` names as holders of pages.
HOLDERS = 20
#: What it says of one.
_HOLDER = ("rid", "client_id", "phase", "pages", "age_s", "prompt_tokens", "cached_tokens", "output_tokens", "max_new_tokens", "rank")


def requests(core: Core) -> dict[str, Any]:
    """`GET /v1/requests`: oldest first. `total` may be more than there are rows."""
    now = time.monotonic()
    scheduled = {row.rid: (worker, row) for worker in core.table.role("scheduler") for row in worker.tables.scheduled}
    rows, total = [], 0
    for frontend in core.table.role("frontend"):
        total += frontend.tables.requests_total
        for owned in frontend.tables.owned:
            worker, row = scheduled.pop(owned.rid, (None, None))
            rows.append(_owned(core, frontend, owned, now) | (_scheduled(worker, row) if worker is not None and row is not None else {}))
    # What only a rank knows: its frontend has died, or has not sent a heartbeat since.
    rows += [_unowned(worker, row, now) for worker, row in scheduled.values()]
    rows.sort(key=lambda row: -row["age_s"])
    return {"requests": rows, "total": max(total, len(rows)), "age_s": _age([*core.table.role("frontend"), *core.table.role("scheduler")], now)}


def kv(core: Core) -> dict[str, Any]:
    """`GET /v1/kv`: the counts of status, the prefix cache's hit rate since the start, its biggest prefixes, who holds most, and how often pages ran out."""
    counters, now = core.ledger.counters(), time.monotonic()
    queried, hit = (int(counters.get(f"llmd_prefix_cache_{what}_tokens_total", 0)) for what in ("queried", "hit"))
    ranks = core.table.role("scheduler")
    counts = status.kv(core)
    found = [(worker, prefix) for worker in ranks for prefix in worker.tables.prefixes]
    held = sorted((row for row in requests(core)["requests"] if row["pages"]), key=lambda row: -row["pages"])
    return {
        **counts,
        "tokens_total": counts["pages_total"] * counts["page_size"],
        "bytes_total": sum(int(worker.info.get("kv", {}).get("bytes", 0)) for worker in core.ready_workers("scheduler")),
        "prefix_cache": {"queried_tokens": queried, "hit_tokens": hit, "hit_rate": round(hit / queried, 4) if queried else None},
        "prefixes": [_prefix(worker, prefix) for worker, prefix in sorted(found, key=lambda item: -item[1].pages)],
        "prefixes_total": sum(worker.tables.prefixes_total for worker in ranks),
        "holders": [{name: row[name] for name in _HOLDER} for row in held[:HOLDERS]],
        "retracted": int(counters.get("llmd_requests_retracted_total", 0)),
        "age_s": _age(ranks, now),
    }


def _owned(core: Core, frontend: Worker, row: OwnedRequest, now: float) -> dict[str, Any]:
    late = now - frontend.beat_at
    age, silent = row.age_s + late, row.silent_s + late if row.silent_s else 0.0
    generating = age - row.first_token_s
    return {
        "rid": row.rid,
        "request": row.request,
        "client_id": row.client_id or None,
        "frontend": frontend.rank,
        "rank": None,
        "phase": "submitted" if core.engine_up else "held",
        "age_s": round(age, 3),
        "waited_s": 0.0,
        "first_token_s": row.first_token_s or None,
        "silent_s": round(silent, 3) if row.silent_s else None,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": 0,
        "output_tokens": row.output_tokens,
        "max_new_tokens": row.max_new_tokens,
        "tokens_s": round(row.output_tokens / generating, 2) if row.first_token_s and generating > 0 else 0.0,
        "pages": 0,
        "priority": 0,
        "streamed": row.streamed,
    }


def _scheduled(worker: Worker, row: ScheduledRequest) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "phase": row.phase,
        "waited_s": row.waited_s,
        "cached_tokens": row.cached_tokens,
        "pages": row.pages,
        "priority": row.priority,
    }


def _unowned(worker: Worker, row: ScheduledRequest, now: float) -> dict[str, Any]:
    unknown = {"request": row.rid, "client_id": None, "first_token_s": None, "silent_s": None, "max_new_tokens": 0, "tokens_s": 0.0, "streamed": False}
    known = {"rid": row.rid, "frontend": row.frontend, "age_s": round(row.age_s + now - worker.beat_at, 3)}
    return {**unknown, **known, "prompt_tokens": row.prompt_tokens, "output_tokens": row.output_tokens} | _scheduled(worker, row)


def _prefix(worker: Worker, prefix: Prefix) -> dict[str, Any]:
    fields = ("name", "start", "tokens", "pages", "below", "hits", "users")
    return {"rank": worker.rank, **{name: getattr(prefix, name) for name in fields}}


def _age(workers: Sequence[Worker], now: float) -> float | None:
    """Age of the oldest of these tables; None while there is none."""
    beats = [worker.beat_at for worker in workers if worker.beat_at]
    return round(now - min(beats), 3) if beats else None
