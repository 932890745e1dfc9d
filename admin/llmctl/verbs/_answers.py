"""What `status` and `health` say, also when nobody answers: the same shape in all four cases, for programs that read it."""

from __future__ import annotations

from typing import Any

from llmctl import exits, find
from llmctl.client import Client
from llmctl.context import Context
from llmctl.exits import CtlError


def fetch(context: Context) -> tuple[dict[str, Any], int, CtlError | None]:
    """(status, exit status, what is wrong): asked of the daemon, else put together from what it left behind."""
    try:
        status = context.get("/v1/status")
    except CtlError as error:
        if error.status not in (exits.NOT_RUNNING, exits.NOT_ANSWERING, exits.TIMED_OUT, exits.LOST):
            raise
        return leftovers(context.client, error)
    if not isinstance(status, dict):
        status = {}
    return status, exits.OK if status.get("state") == "ready" else exits.FAILED, None


def leftovers(client: Client, error: CtlError) -> tuple[dict[str, Any], int, CtlError]:
    """What can be told of a daemon that does not answer."""
    place = find.choose(client.candidates)
    pid = place.pid if place else None
    running = pid is not None or error.status in (exits.TIMED_OUT, exits.NOT_ANSWERING)
    starting = place is not None and place.is_starting and error.status == exits.NOT_ANSWERING
    status = exits.FAILED if starting else exits.NOT_ANSWERING if running else exits.NOT_RUNNING
    lock = place.lock if place else {}
    last = place.last_state if place else {}
    state = "starting" if starting else last.get("state") if running else _ended(last.get("state"))
    if starting:
        last, error = {}, CtlError(status, f"llmd (pid {pid}) has just been started and says nothing yet", "try again in a few seconds")
    answer = {
        "state": state,
        "stage": last.get("stage"),
        "reason": last.get("reason") or error.message,
        "running": running,
        "answering": False,
        "pid": pid if running else lock.get("pid"),
        "last_state": last.get("state"),
        "last_state_age_s": place.last_state_age if place else None,
        "version": lock.get("version"),
        "start_id": lock.get("start_id"),
        "started_at": lock.get("started_at"),
        "http": lock.get("http"),
        "looked_at": [str(candidate.socket) for candidate in client.candidates],
        "degraded": [],
        "epoch": None,
        "weights_version": None,
        "model": None,
        "uptime_s": None,
        "processes": [],
        "requests": {"running": None, "waiting": None, "held": None},
        "kv": {"page_size": None, "pages_total": None, "pages_free": None, "pages_active": None, "pages_cached": None},
        "throughput": {"prompt_tokens_s": None, "generation_tokens_s": None},
    }
    return answer, status, CtlError(status, error.message, error.hint)


def _ended(last: object) -> str:
    """The state of a daemon that is no more: an ordered end records `stopped` or `failed`; whatever else is recorded, it died."""
    return str(last) if last in ("stopped", "failed") else "died" if last else "stopped"


#: Columns of a process table that hold numbers.
PROCESS_NUMBERS = frozenset({"RANK", "PID", "RESTARTS", "UPTIME", "MEMORY", "REPLACED", "HEARTBEAT", "INCARNATION"})


def process_rows(processes: Any, wide: bool) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a process table. RESTARTS came after an end that nobody wanted, REPLACED after one that was asked for."""
    from llmctl.output import duration, size

    columns = ["ROLE", "RANK", "PID", "STATE", "RESTARTS", "UPTIME", "MEMORY"] + (["REPLACED", "HEARTBEAT", "INCARNATION"] if wide else []) + ["LAST EXIT"]
    rows = []
    for process in processes if isinstance(processes, list) else []:
        row = [process.get("role"), process.get("rank"), process.get("pid") or None, process.get("state"), process.get("restarts")]
        row += [duration(process.get("uptime_s")), size(process.get("rss_bytes"))]
        if wide:
            row += [process.get("replaced"), duration(process.get("heartbeat_age_s")), process.get("incarnation")]
        rows.append([*row, last_exit(process.get("last_exit"))])
    if all(row[-1] == "" for row in rows):
        return columns[:-1], [row[:-1] for row in rows]
    return columns, rows


def last_exit(value: Any) -> str:
    """`killed by SIGKILL, 4m ago (hang)`."""
    from llmctl.output import duration
    from llmctl.verbs._deaths import ended

    if not isinstance(value, dict):
        return ""
    if value.get("reason") == "reload":
        return f"replaced as asked, {duration(value.get('age_s'))} ago"
    reason, ago = value.get("reason"), f"{duration(value.get('age_s'))} ago"
    return f"{ended(value.get('status'))}, {ago}" + (f" ({reason})" if reason not in (None, "exit", "signal") else "")
