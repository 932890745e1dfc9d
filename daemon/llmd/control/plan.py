"""What a verb would do, worked out before it does anything: the one plan that `dry_run` returns and that a real run carries out.

A planner refuses by raising RequestError, for both. It changes nothing; what it had to prepare for the run is in `Plan.prepared`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from llmd.control import requests as tables
from llmd.control.core import Core

#: Requests that a plan names one by one.
NAMED = 50


class Plan(Struct, kw_only=True):
    """The effects of one operation. Counts are of the moment in which it was made."""

    steps: list[str]
    """What is done, in words and in this order."""
    processes_restarted: list[str] = []
    processes_stopped: list[str] = []
    requests_aborted: int = 0
    """End with an error."""
    requests_held: int = 0
    """Pause, and go on."""
    requests_finished: int = 0
    """Are waited for."""
    requests: list[str] = []
    """The rids of those, the first of them."""
    tokens_dropped: int = 0
    """Generated already, and lost with what is aborted."""
    pages_forgotten: int = 0
    """Cached KV pages."""
    downtime_s: float | None = 0.0
    """Time without an engine, as far as the last start tells; null: not known."""
    drains_first_s: float | None = None
    """Before that, new requests are refused and running ones waited for, this long at most; null: nothing is drained."""
    changes: list[dict[str, Any]] = []
    """Of a config reload: key, before, after, reload, origin."""
    refused: dict[str, str] | None = None
    """`code`, `message`, `hint`: a real run ends with this and does nothing."""
    details: dict[str, Any] = {}
    prepared: Any = None
    """For the run alone."""

    def shown(self) -> dict[str, Any]:
        """As it is told to operators."""
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, prepared=None))
        del fields["prepared"]
        return fields


def in_flight(core: Core) -> list[dict[str, Any]]:
    """The rows of /v1/requests."""
    rows: list[dict[str, Any]] = tables.requests(core)["requests"]
    return rows


def rids(rows: list[dict[str, Any]]) -> list[str]:
    """The first of them, each request once."""
    return list(dict.fromkeys(row["request"] for row in rows))[:NAMED]


def dropped(rows: list[dict[str, Any]]) -> int:
    """Tokens that are lost when these end."""
    return sum(row["output_tokens"] for row in rows)


def cached_pages(core: Core) -> int:
    """Pages that nobody uses now, and that are known."""
    return int(core.gauge('llmd_kv_pages{state="cached"}') or 0)


def ranks(core: Core) -> list[str]:
    """Names of the engine's processes."""
    return [spec.name for spec in core.boot.processes if spec.role == "scheduler"]


def replaces_engine(core: Core, *, aborts: bool, first: list[str]) -> Plan:
    """The plan of whatever starts the engine anew. `aborts`: what runs ends, in place of going on afterwards."""
    rows = in_flight(core)
    names = ranks(core)
    return Plan(
        steps=[*first, f"start {', '.join(names)} anew", "wait until the engine is ready"],
        processes_restarted=names,
        requests_aborted=len(rids(rows)) if aborts else 0,
        requests_held=0 if aborts else len(rids(rows)),
        requests=rids(rows),
        tokens_dropped=dropped(rows) if aborts else 0,
        pages_forgotten=cached_pages(core),
        downtime_s=round(core.remembered.load_s, 1) if core.remembered.load_s is not None else None,
    )
