"""The answers of the reading half of the admin plane, from what control knows: no rank is ever asked."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import psutil

from llmd import __version__
from llmd.control.core import Core
from llmd.control.drain import INFLIGHT
from llmd.control.snapshot import ProcessView
from llmd.control.table import Worker
from llmd.control.watchdog import standstill
from llmd.plan.spec import ProcessSpec

#: Seconds over which tokens per second are measured.
RATE_WINDOW = 5.0


class Rates:
    """Tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque()

    def sample(self, counters: Mapping[str, float], now: float) -> None:
        """Take the counters' values at `now`."""
        self._samples.append((now, counters.get("llmd_prompt_tokens_total", 0.0), counters.get("llmd_generation_tokens_total", 0.0)))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW:
            self._samples.popleft()

    def throughput(self) -> dict[str, float]:
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return {"prompt_tokens_s": 0.0, "generation_tokens_s": 0.0}
        (t0, p0, g0), (t1, p1, g1) = self._samples[0], self._samples[-1]
        return {"prompt_tokens_s": round((p1 - p0) / (t1 - t0), 2), "generation_tokens_s": round((g1 - g0) / (t1 - t0), 2)}


def status(core: Core, rates: Rates) -> dict[str, Any]:
    """`GET /v1/status`."""
    stage, progress = core.stage()
    return {
        "state": core.shown_state,
        "stage": stage,
        "progress": progress,
        "reason": core.reason,
        "state_age_s": round(time.monotonic() - core.machine.since, 3),
        "degraded": list(core.degraded),
        "epoch": core.epoch,
        "engine_up": core.engine_up,
        "weights_version": core.boot.files.weights_version,
        "model": core.boot.served_name,
        "uptime_s": round(core.snapshot.uptime_s + time.monotonic() - core.snapshot_at, 3) if core.snapshot else 0.0,
        "processes": processes(core),
        "requests": requests(core),
        "in_flight": int(core.gauge(INFLIGHT) or 0),
        "kv": kv(core),
        "throughput": rates.throughput(),
        "operation": core.remembered.operation,
        "failpoints": core.boot.failpoints,
        "version": __version__,
        "start_id": core.boot.start_id,
        "http": core.boot.http_url,
    }


def requests(core: Core) -> dict[str, int]:
    """`held`: they have come, or had begun, and wait for an engine or detokenizer that is away."""
    held = int(core.gauge("llmd_requests_held") or 0)
    if not core.can_generate:
        held += sum(worker.tables.requests_total for worker in core.table.role("frontend"))
    return {"running": int(core.gauge("llmd_requests_running") or 0), "waiting": int(core.gauge("llmd_requests_waiting") or 0), "held": held}


def kv(core: Core) -> dict[str, int]:
    """`GET /v1/kv`. All 0 while no scheduler is ready."""
    facts = [w.info.get("kv", {}) for w in core.ready_workers("scheduler")]
    result = {
        "page_size": int(facts[0].get("page_size", 0)) if facts else core.boot.args.memory.page_size,
        "pages_total": sum(int(f.get("pages_total", 0)) for f in facts),
    }
    gauges = {state: core.gauge(f'llmd_kv_pages{{state="{state}"}}') for state in ("free", "active", "cached")}
    if gauges["free"] is None:
        # A new engine has not sent a heartbeat since it is ready: all its pages are free.
        gauges["free"] = result["pages_total"]
    return result | {f"pages_{state}": int(value or 0) for state, value in gauges.items()}


def weights(core: Core) -> dict[str, Any]:
    """`GET /v1/weights`."""
    files = core.boot.files
    return {
        "weights_version": files.weights_version,
        "name": files.name,
        "path": files.path,
        "kind": files.kind,
        "architecture": files.architecture,
        "quantization": files.quantization,
        "weights_bytes": files.weights_bytes,
        "context_length": files.context_length,
    }


def processes(core: Core) -> list[dict[str, Any]]:
    """`GET /v1/processes`: supervisor first, then the plan's order."""
    snapshot = core.snapshot
    supervisor = {
        "role": "supervisor",
        "rank": 0,
        "pid": snapshot.pid if snapshot else os.getppid(),
        "state": "stopping" if snapshot and snapshot.stopping else "ready",
        "restarts": 0,
        "replaced": 0,
        "uptime_s": round(snapshot.uptime_s, 3) if snapshot else 0.0,
        "heartbeat_age_s": round(time.monotonic() - core.snapshot_at, 3) if snapshot else None,
        "rss_bytes": snapshot.rss_bytes if snapshot else 0,
        "last_exit": None,
    }
    return [supervisor, *(_process(core, spec) for spec in core.boot.processes)]


def _process(core: Core, spec: ProcessSpec) -> dict[str, Any]:
    now = time.monotonic()
    view = core.snapshot.process(spec.name) if core.snapshot else None
    worker = core.table.get(spec.name)
    own = spec.role == "control"
    last = view.last_exit if view else None
    return {
        "role": spec.role,
        "rank": spec.rank,
        "pid": os.getpid() if own else worker.pid if worker else view.pid if view else 0,
        "state": "ready" if own else _state(core, worker, view, now),
        "restarts": view.restarts if view else 0,
        "replaced": view.replaced if view else 0,
        "uptime_s": round(view.uptime_s, 3) if view else 0.0,
        "heartbeat_age_s": 0.0 if own else round(now - worker.heard_at, 3) if worker else None,
        "rss_bytes": psutil.Process().memory_info().rss if own else worker.rss_bytes if worker else 0,
        "last_exit": {"status": last.status, "reason": last.reason, "age_s": round(last.age_s, 3), "stderr": last.stderr} if last else None,
        "stage": "" if own or worker is None or worker.ready else worker.stage,
        "phase": worker.phase if worker else "",
        "steps": worker.steps if worker else 0,
        "incarnation": worker.incarnation if worker else view.incarnation if view else 0,
        "backoff_s": view.backoff_s if view else 0.0,
    }


def _state(core: Core, worker: Worker | None, view: ProcessView | None, now: float) -> str:
    if view is not None and view.state in ("backoff", "stopping", "exited") and worker is None:
        return view.state
    if worker is None:
        return "starting"
    if not worker.ready:
        return "starting" if worker.stage == "starting" else "loading"
    if worker.blocked_on:
        return "blocked"
    if standstill(worker, core.boot.args.supervision, now):
        return "stalled"
    return "ready" if worker.phase == "idle" or worker.role == "frontend" else "busy"
