"""Asks the daemon, and keeps what it said: `Feed.poll` makes one `Picture`. Blocks for as long as the daemon does; the app calls it from a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from llmctl import exits
from llmctl.exits import CtlError
from llmctl.top import metrics
from llmctl.top.history import History

#: Seconds for one answer.
PATIENCE: Final = 2.0
#: Events and log lines that are kept, and characters of one.
KEPT: Final = 1000
LONGEST: Final = 4000
#: Seconds over which the CPU share of a process is taken.
_CPU_WINDOW: Final = 5.0
_QUANTILES: Final = (0.5, 0.9, 0.99)
#: Seconds without an answer after which the daemon is asked what the time between was like.
_GAP: Final = 10.0
#: Chart -> what `/v1/history` calls it.
_RECALLED: Final = {
    "out": "generation_tokens_s", "in": "prompt_tokens_s", "running": "running", "waiting": "waiting", "kv": "kv_used", "first_token": "first_token_s",
    "gap": "between_tokens_s",
}  # fmt: skip


class Asks(Protocol):
    """What the dashboard needs of llmctl.client.Client."""

    def get(self, path: str, timeout: float, **query: Any) -> Any: ...
    def text(self, path: str, timeout: float) -> str: ...
    def post(self, path: str, body: dict[str, Any], timeout: float) -> Any: ...


@dataclass(frozen=True)
class Picture:
    """All that is shown. What could not be asked is as it was before."""

    status: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()
    logs: tuple[str, ...] = ()
    cpu: dict[str, float] = field(default_factory=dict)
    """ROLE-RANK -> share of one CPU."""
    first_token: tuple[float | None, ...] = (None,) * len(_QUANTILES)
    """p50, p90, p99 of the last minute, in seconds."""
    gap: tuple[float | None, ...] = (None,) * len(_QUANTILES)
    """Between two tokens, likewise."""
    at: float | None = None
    """When the daemon last answered, on the feed's clock."""
    error: CtlError | None = None
    """Why it did not this time."""
    left: dict[str, Any] = field(default_factory=dict)
    """What can be read of it without an answer, then: state and reason, as `llmctl status` has them."""


class Feed:
    """See the module. `logs` gives the log lines that came since it was last called; `left` what a daemon that does not answer has left behind."""

    def __init__(
        self,
        asks: Asks,
        clock: Callable[[], float] = time.monotonic,
        logs: Callable[[], Sequence[str]] | None = None,
        left: Callable[[CtlError], dict[str, Any]] = lambda error: {},
    ) -> None:
        self.asks = asks
        self.clock = clock
        self.history = History()
        self.picture = Picture()
        self._logs = logs
        self._left = left
        self._first_token = metrics.Recent("llmd_time_to_first_token_seconds")
        self._gap = metrics.Recent("llmd_inter_token_latency_seconds")
        self._cpu: deque[tuple[float, dict[str, float]]] = deque()
        self._seq = 0
        self._start_id: object = None

    def poll(self, tab: int = 1) -> Picture:
        """Ask for what the tab shows; the overview's numbers always, so that its charts have no holes."""
        self._read_logs()
        try:
            self._ask(tab)
        except CtlError as error:
            self.picture = replace(self.picture, error=error, left=self._left(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            strange = CtlError(exits.FAILED, f"llmd's answer is not understood ({type(error).__name__}: {error})", "llmctl version shows both versions")
            self.picture = replace(self.picture, error=strange, left={})
        return self.picture

    def since_start(self) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """The percentiles of the time to the first token and of the gaps, since llmd has started."""
        return tuple(map(self._first_token.since_start, _QUANTILES)), tuple(map(self._gap.since_start, _QUANTILES))

    def _ask(self, tab: int) -> None:
        status = self.asks.get("/v1/status", PATIENCE)
        if status.get("start_id") != self._start_id:
            self._start_id, self._seq = status.get("start_id"), 0
            self._cpu.clear()
        values = metrics.parse(self.asks.text("/metrics", PATIENCE))
        events = self.asks.get("/v1/events", PATIENCE, since=self._seq, follow="false")["events"]
        kv = self.asks.get("/v1/kv", PATIENCE) if tab == 3 else self.picture.kv
        requests = self.asks.get("/v1/requests", PATIENCE) if tab == 4 else self.picture.requests
        now = self.clock()
        if self.picture.at is None or now - self.picture.at > _GAP:
            self._recall()
        self._first_token.take(values, now)
        self._gap.take(values, now)
        self._seq = max([self._seq, *(event["seq"] for event in events)])
        self.picture = replace(
            self.picture, status=status, kv=kv, requests=requests, events=(*self.picture.events, *events)[-KEPT:], cpu=self._shares(values, now),
            first_token=tuple(map(self._first_token.quantile, _QUANTILES)), gap=tuple(map(self._gap.quantile, _QUANTILES)), at=now, error=None,
        )  # fmt: skip
        self.history.take(now, sample(self.picture))

    def _recall(self) -> None:
        """Take the daemon's own history for the time in which nobody asked."""
        try:
            samples = self.asks.get("/v1/history", PATIENCE)["samples"]
        except CtlError as error:
            if error.data is None:
                raise
            return  # it answers, and has none: an older llmd
        now = self.clock()
        self.history.recall([(now - sample["age_s"], {name: sample[field] for name, field in _RECALLED.items()}) for sample in samples])

    def _shares(self, values: metrics.Values, now: float) -> dict[str, float]:
        """CPU time of each process over the last seconds. A counter never goes down while its daemon lives."""
        used = {f"{labels['role']}-{labels['rank']}": value for labels, value in metrics.labelled(values, "llmd_process_cpu_seconds_total")}
        self._cpu.append((now, used))
        while len(self._cpu) > 2 and now - self._cpu[0][0] > _CPU_WINDOW:
            self._cpu.popleft()
        (then, before) = self._cpu[0]
        return {name: max(0.0, value - before[name]) / (now - then) for name, value in used.items() if name in before and now > then}

    def _read_logs(self) -> None:
        if self._logs is None:
            return
        try:
            lines = self._logs()
        except (OSError, CtlError):
            return  # no log is a reason to show none
        if lines:
            self.picture = replace(self.picture, logs=(*self.picture.logs, *(line[:LONGEST] for line in lines[-KEPT:]))[-KEPT:])


def sample(picture: Picture) -> dict[str, float | None]:
    """The numbers of a picture that have a chart."""
    status = picture.status
    throughput, requests, kv = status.get("throughput") or {}, status.get("requests") or {}, status.get("kv") or {}
    total = kv.get("pages_total") or 0
    return {
        "out": throughput.get("generation_tokens_s"),
        "in": throughput.get("prompt_tokens_s"),
        "running": requests.get("running"),
        "waiting": requests.get("waiting"),
        "kv": (total - (kv.get("pages_free") or 0)) / total if total else None,
        "first_token": picture.first_token[0],
        "gap": picture.gap[0],
    }
