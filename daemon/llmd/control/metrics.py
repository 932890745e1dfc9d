"""The one registry: counters and histograms from the ledger, gauges from the living workers, and control's own facts."""

from __future__ import annotations

import time

import psutil

from llmd import __version__
from llmd.control import compat
from llmd.control.catalog import ZERO_COUNTERS, ZERO_HISTOGRAMS
from llmd.control.core import Core
from llmd.control.drain import INFLIGHT
from llmd.control.exposition import escape, render
from llmd.control.ledger import valid_key
from llmd.control.machine import STATES
from llmd.control.table import Worker
from llmd.observability.totals import LATENCY_BOUNDS, series
from llmd.wire.messages import HistogramTotals, Totals

#: Gauges that are shown with 0 while no worker sends them.
_ZERO_GAUGES = ("llmd_requests_running", "llmd_requests_waiting")

#: A histogram that nothing has been put into yet.
_NOTHING = HistogramTotals(LATENCY_BOUNDS, (0,) * (len(LATENCY_BOUNDS) + 1), 0.0)

#: Gauges between processes, not for scraping.
_PRIVATE = frozenset({INFLIGHT})


class Metrics:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._self = psutil.Process()
        self._took = 0.0
        self._taken: dict[str, tuple[int, Totals, float]] = {}
        self._own: tuple[float, float] | None = None

    def take(self, worker: Worker) -> None:
        """A heartbeat's totals, where they are new."""
        cpu_s, known = _tenths(worker.cpu_s), self._taken.get(worker.name)
        if known is not None and known[0] == worker.incarnation and known[1] is worker.totals and known[2] == cpu_s:
            return
        self._taken[worker.name] = worker.incarnation, worker.totals, cpu_s
        self._core.ledger.take(worker.name, worker.incarnation, worker.totals, {_cpu(worker.role, worker.rank): cpu_s})

    def take_own(self) -> None:
        """CPU time of control itself, and of the supervisor."""
        core = self._core
        own = _tenths(time.process_time()), _tenths(core.snapshot.cpu_s) if core.snapshot is not None else 0.0
        if own == self._own:
            return
        self._own = own
        core.ledger.take("control-0", core.context.incarnation, Totals(), {_cpu("control", 0): own[0]})
        if core.snapshot is not None:
            core.ledger.take("supervisor-0", 1, Totals(), {_cpu("supervisor", 0): own[1]})

    def render(self) -> str:
        """The exposition, complete."""
        began = time.perf_counter()
        gauges = self._facts()
        gauges.update(self._processes())
        gauges.update(self._workers())
        gauges["llmd_scrape_duration_seconds"] = self._took
        ledger = self._core.ledger
        counters = {**dict.fromkeys(ZERO_COUNTERS, 0.0), **self._zero_kills(), **ledger.counters()}
        histograms = {**dict.fromkeys(ZERO_HISTOGRAMS, _NOTHING), **ledger.histograms()}
        projects = self._core.boot.args.observability.metrics.compat
        more = compat.project(projects, self._core.boot.served_name, gauges, counters, histograms)
        text = render(gauges, counters, histograms, more)
        self._took = time.perf_counter() - began
        return text

    def _facts(self) -> dict[str, float]:
        core, files = self._core, self._core.boot.files
        info = core.model_info
        model = (("model", escape(core.boot.served_name)), ("dtype", escape(str(info.get("dtype", "")))), ("quantization", escape(files.quantization)))
        facts = {
            series("llmd_build_info", (("version", __version__),)): 1.0,
            series("llmd_model_info", model): 1.0,
            series("llmd_weights_info", (("version", escape(files.weights_version)),)): 1.0,
            "llmd_engine_epoch": float(core.epoch),
        }
        facts.update({series("llmd_state", (("state", state),)): float(state == core.shown_state) for state in STATES})
        pages = _pages_total(core)
        if pages is not None:
            facts["llmd_kv_capacity_pages"] = float(pages)
        return facts

    def _processes(self) -> dict[str, float]:
        core = self._core
        wall = time.time() - time.monotonic()
        rows: dict[str, float] = {}
        for spec in core.boot.processes:
            view = core.snapshot.process(spec.name) if core.snapshot else None
            worker = core.table.get(spec.name)
            labels = (("role", spec.role), ("rank", str(spec.rank)))
            rows[series("llmd_process_up", labels)] = float(spec.role == "control" or worker is not None or bool(view and view.pid))
            if spec.role == "control":
                rows[series("llmd_process_resident_memory_bytes", labels)] = float(self._self.memory_info().rss)
                rows[series("llmd_process_heartbeat_timestamp_seconds", labels)] = time.time()
            elif worker is not None and worker.beat_at:
                rows[series("llmd_process_resident_memory_bytes", labels)] = float(worker.rss_bytes)
                rows[series("llmd_process_heartbeat_timestamp_seconds", labels)] = worker.beat_at + wall
        supervisor = (("role", "supervisor"), ("rank", "0"))
        rows[series("llmd_process_up", supervisor)] = 1.0
        if core.snapshot is not None:
            rows[series("llmd_process_resident_memory_bytes", supervisor)] = float(core.snapshot.rss_bytes)
            rows[series("llmd_process_heartbeat_timestamp_seconds", supervisor)] = core.snapshot_at + wall
        return rows

    def _workers(self) -> dict[str, float]:
        rows = dict.fromkeys(_ZERO_GAUGES, 0.0)
        for worker in self._core.table:
            for key, value in worker.totals.gauges.items():
                if key not in _PRIVATE and valid_key(key):
                    rows[key] = rows.get(key, 0.0) + value
        return rows

    def _zero_kills(self) -> dict[str, float]:
        roles = {p.role for p in self._core.boot.processes} - {"control"}
        return {series("llmd_watchdog_kills_total", (("role", role),)): 0.0 for role in sorted(roles)}


def _pages_total(core: Core) -> int | None:
    totals = [w.info.get("kv", {}).get("pages_total") for w in core.ready_workers("scheduler")]
    numbers = [n for n in totals if isinstance(n, int)]
    return sum(numbers) if numbers else None


def _cpu(role: str, rank: int) -> str:
    return series("llmd_process_cpu_seconds_total", (("role", role), ("rank", str(rank))))


def _tenths(seconds: float) -> float:
    """CPU time in whole tenths: each change of a counter is a new state file, and an idle daemon would write one with each heartbeat."""
    return int(seconds * 10) / 10
