"""What the dashboard says: of the daemon's state, and what to do about it. Plain text, for the screen and for `--once`."""

from __future__ import annotations

import time
from typing import Any, Final

from llmctl import exits
from llmctl.output import counted, duration, one_line
from llmctl.top.feed import Picture
from llmctl.verbs._answers import last_exit

#: State -> what to do, or what will happen by itself.
_ADVICE: Final = {
    "starting": "it is starting; nothing to do but wait",
    "loading": "it is loading the model; nothing to do but wait",
    "warming": "it tries itself out; ready in a moment",
    "recovering": "requests are held and go on; it comes back by itself (5: what happened)",
    "reloading": "new weights are being loaded; it comes back by itself",
    "draining": "new requests are refused; e takes them again (llmctl resume)",
    "stopping": "it finishes what runs, then ends",
    "failed": "it gave up: llmctl crashes, llmctl logs",
}
#: Without an answer: exit status -> the word in place of a state.
_SILENT: Final = {exits.NOT_RUNNING: "not running", exits.PERMISSION: "not allowed", exits.FAILED: "not understood"}
#: Seconds after which a last answer is old.
STALE: Final = 3.0


def state(picture: Picture) -> str:
    """The daemon's state, or that it does not say it."""
    if picture.error is not None:
        return _SILENT.get(picture.error.status, "not answering")
    return str(picture.status.get("state") or "asking")


def reason(picture: Picture) -> str:
    """Why it is so, in one line."""
    if picture.error is not None:
        return one_line(picture.error.message)
    status = picture.status
    if not status:
        return "waiting for the first answer"
    stage, progress = status.get("stage"), status.get("progress")
    share = f" {progress:.0%}" if isinstance(progress, float) and 0 < progress < 1 else ""
    degraded = [f"degraded: {one_line(why)}" for why in status.get("degraded") or []]
    said = [f"{stage}{share}" if stage else "", one_line(status["reason"]) if status.get("reason") else "", *degraded]
    return "; ".join(part for part in said if part) or "it serves, and nothing is wrong" if status.get("state") == "ready" else "; ".join(filter(None, said))


def advice(picture: Picture) -> str:
    """What to do about it; empty if nothing."""
    if picture.error is not None:
        return picture.error.hint and one_line(picture.error.hint)
    status = picture.status
    if status.get("failpoints") and status.get("state") == "ready":
        return "failpoints are armed: this llmd is meant for tests"
    if status.get("degraded"):
        return "2: which process; 5: what happened; llmctl doctor"
    return _ADVICE.get(str(status.get("state")), "")


def news(picture: Picture) -> str:
    """The last thing that happened."""
    if not picture.events:
        return ""
    last = picture.events[-1]
    return f"last event  {clock_time(last.get('at'))}  {one_line(last.get('message'))}"


def clock_time(at: Any) -> str:
    """The time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else "–"


def life(status: dict[str, Any]) -> str:
    """`up 2h 5m, epoch 1`."""
    restarts = sum(int(process.get("restarts") or 0) for process in status.get("processes") or [])
    parts = [f"up {duration(status.get('uptime_s'))}", f"epoch {status.get('epoch')}", *([counted(restarts, "restart")] if restarts else [])]
    return " · ".join(parts) if status else ""


def identity(status: dict[str, Any]) -> str:
    """`MODEL · ADDRESS · WEIGHTS`, as much as is known."""
    return " · ".join(str(status[name]) for name in ("model", "http", "weights_version") if status.get(name))


def number(value: Any) -> str:
    """`0`, `3.4`, `812`, `12,040`; `–` for what is not known."""
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.1f}" if 0 < value < 100 and not isinstance(value, int) else f"{value:,.0f}"


def short_time(seconds: float | None) -> str:
    """`–`, `3.1 ms`, `120 ms`, `1.4 s`."""
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def percentiles(values: tuple[float | None, ...]) -> list[tuple[str, str]]:
    """(`p50`, `120 ms`) and so on."""
    return [(name, short_time(value)) for name, value in zip(("p50", "p90", "p99"), values, strict=True)]


def exit_text(process: dict[str, Any]) -> str:
    """How it ended last, in one line."""
    return last_exit(process.get("last_exit")) or "–"
