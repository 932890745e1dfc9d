"""What the dashboard says: of the daemon's state, and what to do about it. Plain text, for the screen and for `--once`. Times are UTC, as in the log."""

from __future__ import annotations

from typing import Any, Final

from llmctl import exits
from llmctl.output import counted, duration, one_line, when
from llmctl.top.feed import Picture
from llmctl.verbs._answers import last_exit

#: State -> what to do, or what will happen by itself.
_ADVICE: Final = {
    "starting": "it is starting; nothing to do but wait",
    "loading": "it is loading the model; nothing to do but wait",
    "warming": "it tries itself out; ready in a moment",
    "recovering": "requests are held and go on; it comes back by itself (5: what happened)",
    "reloading": "it comes back by itself, with the old weights if the new ones do not load",
    "draining": "new requests are refused; e takes them again (llmctl resume)",
    "stopping": "new requests are refused, running ones may finish; then it ends",
    "failed": "it gave up: llmctl crashes, llmctl logs",
}
#: States in which there may be no control process yet, or none any more that would answer.
_COMING_UP: Final = ("starting", "loading", "warming")
#: Of a daemon that does not answer.
_SILENT_ADVICE: Final = {
    **{state: _ADVICE[state] for state in _COMING_UP},
    "not answering": "it is asked again every second; if this lasts: llmctl status, llmctl logs",
}
#: Without an answer, and without traces of a daemon: exit status -> the word in place of a state.
_SILENT: Final = {exits.NOT_RUNNING: "not running", exits.PERMISSION: "not allowed", exits.FAILED: "not understood"}
#: State of the daemon, of a process or of an operation -> a name of the theme's colours; what is not here has none.
STATES: Final = {
    **dict.fromkeys(("ready", "busy", "succeeded", "ok"), "success"),
    **dict.fromkeys(
        ("starting", "loading", "warming", "recovering", "reloading", "draining", "paused", "asleep", "stopping", "blocked", "running", "pending"), "warning"
    ),
    **dict.fromkeys(
        ("died", "failed", "stalled", "backoff", "exited", "partial", "rolled_back", "not running", "not answering", "not allowed", "not understood"), "error"
    ),
}
#: Severity of an event or level of a log line -> a name of the theme's colours.
SEVERITIES: Final = {"error": "error", "critical": "error", "warning": "warning"}
#: Seconds after which a last answer is old.
STALE: Final = 3.0
#: Seconds without a heartbeat that are told.
SILENT: Final = 5.0


def state(picture: Picture) -> str:
    """The daemon's state, or that it does not say it."""
    if picture.error is not None:
        left = str(picture.left.get("state") or "")
        known = left in _COMING_UP or (picture.error.status == exits.NOT_RUNNING and left)
        return left if known else _SILENT.get(picture.error.status, "not answering")
    return "stopping" if _is_stopping(picture.status) else str(picture.status.get("state") or "asking")


def _is_stopping(status: dict[str, Any]) -> bool:
    """A daemon that stops drains first: the state does not tell that this drain is no pause, its supervisor does."""
    return any(process.get("role") == "supervisor" and process.get("state") == "stopping" for process in status.get("processes") or [])


def _silent(status: dict[str, Any]) -> list[str]:
    """Processes that are there and have said nothing for so long that somebody should look; llmd itself acts later."""
    rows = [row for row in status.get("processes") or [] if row.get("state") in ("ready", "busy")]
    ages = [(f"{row.get('role')}-{row.get('rank')}", row.get("heartbeat_age_s")) for row in rows]
    return [f"{name} has not been heard for {duration(age)}" for name, age in ages if isinstance(age, int | float) and age > SILENT]


def hue(picture: Picture) -> str:
    """The colour of the state: a name of the theme's."""
    if picture.error is None and (picture.status.get("degraded") or _silent(picture.status)):
        return "warning"
    return STATES.get(state(picture), "muted")


def reason(picture: Picture) -> str:
    """Why it is so, in one line."""
    if picture.error is not None:
        return one_line(picture.left.get("reason") or picture.error.message)
    status = picture.status
    if not status:
        return "waiting for the first answer"
    stage, progress = status.get("stage"), status.get("progress")
    share = f" {progress:.0%}" if isinstance(progress, float) and 0 < progress < 1 else ""
    degraded = [f"degraded: {one_line(why)}" for why in status.get("degraded") or []]
    said = [f"{stage}{share}" if stage else "", one_line(status["reason"]) if status.get("reason") and not degraded else "", *degraded]
    waits = f"{counted(int(status['in_flight']), 'request')} in flight" if _is_stopping(status) and status.get("in_flight") else ""
    fine = "it serves, and nothing is wrong" if status.get("state") == "ready" else ""
    return "; ".join(filter(None, [*said, *_silent(status), waits])) or fine


def advice(picture: Picture) -> str:
    """What to do about it; empty if nothing."""
    if picture.error is not None:
        return _SILENT_ADVICE.get(state(picture)) or (picture.error.hint and one_line(picture.error.hint))
    status = picture.status
    if status.get("failpoints") and status.get("state") == "ready":
        return "failpoints are armed: this llmd is meant for tests"
    if status.get("degraded"):
        return "2: which process; 5: what happened; llmctl doctor"
    if _silent(status):
        return "2: which process; if it hangs, llmd replaces it, and requests are held meanwhile"
    return _ADVICE.get(state(picture), "")


def news(picture: Picture) -> str:
    """The last thing that happened."""
    if not picture.events:
        return ""
    last = picture.events[-1]
    return f"last event  {clock_time(last.get('at'))}Z  {one_line(last.get('message'))}"


def clock_time(at: Any) -> str:
    """The time of day, in UTC."""
    return when(at)[11:19] or "–"


def life(status: dict[str, Any]) -> str:
    """`up 2h 5m · epoch 1`."""
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
    """`–`, `3.1ms`, `120ms`, and from a second on as `duration` has it."""
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f}ms" if seconds < 0.01 else f"{seconds * 1e3:.0f}ms" if seconds < 1 else duration(seconds)


def percentiles(values: tuple[float | None, ...]) -> list[tuple[str, str]]:
    """(`p50`, `120ms`) and so on."""
    return [(name, short_time(value)) for name, value in zip(("p50", "p90", "p99"), values, strict=True)]


def exit_text(process: dict[str, Any]) -> str:
    """How it ended last, in one line."""
    return last_exit(process.get("last_exit")) or "–"
