"""A daemon for the dashboard's tests: answers from memory, always the same, a quarter of an hour of load behind it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from llmctl import exits
from llmctl.exits import CtlError
from llmctl.top.feed import Feed, sample

ABSENT = CtlError(
    exits.NOT_RUNNING, "llmd is not running: there is no socket at /run/llmd/admin.sock", "start it with `llmd run`, or say where it is with --socket PATH"
)
PLAN: dict[str, Any] = {
    "steps": ["start scheduler-0 anew", "wait until the engine is ready"],
    "processes_restarted": ["scheduler-0"],
    "requests_held": 12,
    "pages_forgotten": 716,
    "downtime_s": 2.4,
}
#: A day in June, so that no time is that of the test.
NOON = 1780308000.0


def process(role: str, pid: int, state: str, rss: int, **more: Any) -> dict[str, Any]:
    facts = {"rank": 0, "restarts": 0, "uptime_s": 7500.0, "heartbeat_age_s": 0.2, "last_exit": None, "stage": "", "phase": "idle", "steps": 0}
    return {"role": role, "pid": pid, "state": state, "rss_bytes": rss << 20, **facts, **more}


ENDED = {"status": -9, "reason": "hang", "age_s": 252.0, "stderr": "scheduler-0: no step for 30 s in forward\nscheduler-0: stacks are in crashes/20260601T1156"}
PROCESSES = [
    process("supervisor", 13381, "ready", 33),
    process("control", 13396, "ready", 54),
    process("frontend", 13397, "ready", 107),
    process("detokenizer", 13399, "busy", 29, phase="batch", steps=90211),
    process("scheduler", 13412, "busy", 870, restarts=1, uptime_s=240.0, last_exit=ENDED, phase="decode", steps=18204),
]


def request(number: int) -> dict[str, Any]:
    waits = number > 11
    return {
        "rid": f"chatcmpl-{0x5EED0000 + number * 7919:08x}{number:04x}4b7f",
        "request": f"chatcmpl-{0x5EED0000 + number * 7919:08x}{number:04x}4b7f",
        "client_id": f"job-{number % 4}" if number % 3 else None,
        "phase": "waiting" if waits else "prefill" if number == 11 else "decode",
        "age_s": 41.0 - 2.7 * number,
        "waited_s": 0.4 if not waits else 3.0,
        "first_token_s": None if number >= 11 else 0.62,
        "silent_s": None if number >= 11 else 0.03 * (number % 3 + 1),
        "prompt_tokens": 128 + 61 * number,
        "cached_tokens": 128,
        "output_tokens": 0 if number >= 11 else 900 - 80 * number,
        "max_new_tokens": 1024,
        "tokens_s": 0.0 if number >= 11 else 24.1 - 0.3 * number,
        "pages": 0 if waits else 64 - 5 * number,
    }


REQUESTS = [request(number) for number in range(14)]
PREFIXES = [
    {"rank": 0, "name": name, "start": start, "tokens": pages * 16, "pages": pages, "below": below, "hits": hits, "users": users}
    for name, start, pages, below, hits, users in (
        ("9f31c2ab", 0, 312, 41, 218, 7), ("41d0aa97", 0, 120, 12, 64, 3), ("c7702e15", 4992, 96, 4, 31, 1), ("0b5e6d3f", 0, 71, 0, 9, 0),
        ("e2f98110", 1920, 40, 2, 5, 1),
    )
]  # fmt: skip


def event(seq: int, ago: float, kind: str, severity: str, message: str, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "at": NOON - ago, "kind": kind, "severity": severity, "message": message, "data": data}


EVENTS = [
    event(1, 7500, "state", "info", "starting -> loading"),
    event(2, 7492, "state", "info", "warming -> ready"),
    event(3, 252, "process", "error", "scheduler-0 hangs: no step for 30 s in forward; its stacks are dumped", process="scheduler-0"),
    event(4, 252, "process", "error", "scheduler-0 (pid 13400) was killed by SIGKILL", process="scheduler-0"),
    event(5, 252, "state", "warning", "ready -> recovering: the engine is away, 12 requests are held"),
    event(6, 247, "process", "info", "scheduler-0 is back (pid 13412, after 5.1 s)", process="scheduler-0"),
    event(7, 247, "state", "info", "recovering -> ready"),
    event(8, 30, "operation", "info", "log-level: succeeded"),
]
LOGS = [
    "2026-06-01T09:55:48.002Z INFO    scheduler: 12 running, 2 waiting, 812 of 8192 pages",
    "2026-06-01T09:55:48.113Z ERROR   control: scheduler-0 hangs: no step for 30 s in forward",
    "2026-06-01T09:55:48.140Z WARNING supervisor: scheduler-0 (pid 13400) was killed by SIGKILL; engine epoch 2 begins",
    "2026-06-01T09:55:53.377Z INFO    scheduler: ready, 870 MiB, 8192 pages of 16 tokens",
]


def exposition(seconds: float) -> str:
    """Counters after so many seconds of load."""
    lines = [f'llmd_process_cpu_seconds_total{{rank="0",role="{role}"}} {share * seconds}' for role, share in CPU.items()]
    for name, bounds, middle, each in (
        ("llmd_time_to_first_token_seconds", (0.05, 0.1, 0.25, 0.5, 1.0, 2.5), 0.2, 3.0),
        ("llmd_inter_token_latency_seconds", (0.01, 0.02, 0.03, 0.05, 0.1, 0.25), 0.021, 200.0),
    ):
        count = each * seconds
        lines += [f'{name}_bucket{{le="{bound}"}} {count * (1 - math.exp(-((bound / middle) ** 2)))}' for bound in bounds]
        lines.append(f'{name}_bucket{{le="+Inf"}} {count}')
    return "\n".join(lines)


CPU = {"supervisor": 0.003, "control": 0.02, "frontend": 0.11, "detokenizer": 0.06, "scheduler": 0.97}


class FakeDaemon:
    """What the dashboard asks. `error`: raised by every question. `posted`: the changes asked for."""

    def __init__(self) -> None:
        self.now = 10_000.0
        self.error: CtlError | None = None
        self.status: dict[str, Any] = {
            "state": "ready", "stage": "", "progress": 1.0, "reason": "", "degraded": [], "epoch": 2, "uptime_s": 7500.0, "start_id": "one", "version": "0.1.0",
            "model": "smollm2-135m-instruct", "weights_version": "SmolLM2-135M-Instruct.Q4_1@b0091e0e5936", "http": "http://127.0.0.1:8000",
            "processes": PROCESSES, "requests": {"running": 12, "waiting": 2}, "throughput": {"prompt_tokens_s": 1210.0, "generation_tokens_s": 281.4},
            "kv": {"page_size": 16, "pages_total": 8192, "pages_free": 6120, "pages_active": 1356, "pages_cached": 716},
        }  # fmt: skip
        self.requests = list(REQUESTS)
        self.events = list(EVENTS)
        self.history: list[dict[str, Any]] = []
        self.operations: deque[dict[str, Any]] = deque()
        self.plan = PLAN
        self.posted: list[tuple[str, dict[str, Any]]] = []

    def get(self, path: str, timeout: float, **query: Any) -> Any:
        if self.error is not None:
            raise self.error
        if path.startswith("/v1/operations/"):
            return self.operations.popleft()
        answers: dict[str, Any] = {
            "/v1/status": self.status,
            "/v1/requests": {"requests": self.requests, "total": len(self.requests)},
            "/v1/kv": {
                **self.status["kv"], "prefixes": PREFIXES, "prefix_cache": {"queried_tokens": 412_002, "hit_tokens": 263_681, "hit_rate": 0.64},
                "holders": sorted((row for row in self.requests if row["pages"]), key=lambda row: -row["pages"]),
            },
            "/v1/history": {"every_s": 5.0, "span_s": 900.0, "samples": self.history},
            "/v1/weights": {"path": "/models/SmolLM2-135M-Instruct.Q4_1.gguf"},
            "/v1/events": {"events": [one for one in self.events if one["seq"] > query.get("since", 0)]},
        }  # fmt: skip
        return answers[path]

    def text(self, path: str, timeout: float) -> str:
        if self.error is not None:
            raise self.error
        return exposition(self.now)

    def post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        if self.error is not None:
            raise self.error
        self.posted.append((path, body))
        return {"plan": self.plan} if body.get("dry_run") else self.operations.popleft()


def feed_of(daemon: FakeDaemon, *, seconds: int = 900) -> Feed:
    """A feed that has seen so many seconds of changing load."""
    logs = [LOGS, []]
    feed = Feed(daemon, clock=lambda: daemon.now, logs=lambda: logs.pop(0) if logs else [])
    for _ in range(2):
        feed.poll()
        daemon.now += 60
    picture = feed.picture
    for second in range(seconds):
        daemon.now += 1
        wave = 0.62 + 0.3 * math.sin(second / 70) + 0.08 * math.sin(second / 11)
        died = 645 <= second < 652
        kv = {**daemon.status["kv"], "pages_free": round(8192 * (1 - 0.25 * wave - 0.0002 * second))}
        load = {
            "throughput": {"generation_tokens_s": 0.0 if died else 330 * wave, "prompt_tokens_s": 0.0 if died else 1500 * wave**2},
            "requests": {"running": 0 if died else round(14 * wave), "waiting": 12 if died else max(0, round(9 * (wave - 0.7)))},
        }
        numbers = sample(picture) | {"out": load["throughput"]["generation_tokens_s"], "in": load["throughput"]["prompt_tokens_s"], **load["requests"]}
        total = kv["pages_total"]
        numbers |= {"kv": 1 - kv["pages_free"] / total, "first_token": None if died else 0.12 + 0.1 * wave**3, "gap": None if died else 0.012 + 0.009 * wave}
        feed.history.take(daemon.now, numbers)
    daemon.now += 1
    for tab in (3, 4):
        feed.poll(tab)
        daemon.now += 1
    feed.poll()
    return feed
