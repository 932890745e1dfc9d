"""The checks of `doctor`. Each looks at one thing and says ok, warning or wrong, and what to do."""

from __future__ import annotations

import grp
import platform
import resource
import shutil
import stat
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmctl import exits, find, statefiles
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import counted, duration, size
from llmctl.verbs._meant import meant
from llmd import __version__

MIB = 2**20
#: Below these a warning, or wrong.
LOW_DISK, NO_DISK = 1024 * MIB, 64 * MIB
LOW_MEMORY = 512 * MIB
FEW_FILES = 4096
MANY_RESTARTS = 3
#: Seconds within which a crash is news.
LATELY = 3600.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    what: str
    state: Literal["ok", "warning", "wrong"]
    text: str
    hint: str = ""


def all_of(context: Context) -> list[Finding]:
    """Everything, in the order in which it should be mended. A check that fails itself is a finding too."""
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check(context)
        except CtlError as error:
            findings.append(Finding(check.__name__.strip("_"), "warning", error.message, error.hint))
        except (OSError, ValueError, KeyError) as error:
            findings.append(Finding(check.__name__.strip("_"), "warning", f"could not be looked at: {error}"))
    return findings


def _system(_: Context) -> Iterator[Finding]:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    good = platform.system() == "Linux" and numbers >= (5, 4) and platform.machine() in ("x86_64", "aarch64")
    text = f"{platform.system()} {release}, {platform.machine()}, Python {platform.python_version()}"
    yield Finding("system", "ok" if good else "wrong", text, "" if good else "llmd needs Linux 5.4 or newer on x86-64 or arm64")


def _daemon(context: Context) -> Iterator[Finding]:
    try:
        status = context.get("/v1/status")
    except CtlError as error:
        wrong = error.status in (exits.NOT_ANSWERING, exits.PERMISSION, exits.LOST)
        yield Finding("daemon", "wrong" if wrong else "warning", error.message, error.hint)
        return
    state, reason, degraded = status.get("state"), status.get("reason"), ", ".join(map(str, status.get("degraded") or []))
    fine = state == "ready" and not degraded
    reason = "; ".join(dict.fromkeys(text for text in (reason, degraded) if text))
    hint = "" if fine else "llmctl resume" if state == "draining" else "llmctl events, llmctl logs"
    yield Finding("daemon", "ok" if fine else "warning", f"{state}{f': {reason}' if reason else ''}", hint)
    if status.get("version") != __version__:
        yield Finding("versions", "warning", f"llmctl {__version__}, llmd {status.get('version')}", "restart llmd after an upgrade")
    if status.get("failpoints"):
        yield Finding("failpoints", "wrong", "armed: this llmd is meant for tests", "start it without --allow-failpoints")
    for process in status.get("processes", []):
        if process.get("state") in ("stalled", "backoff", "exited"):
            name, silent = f"{process['role']}-{process['rank']}", duration(process.get("heartbeat_age_s"))
            yield Finding(name, "warning", f"{process['state']}, last heard {silent} ago; llmd replaces it by itself", f"llmctl logs {name}")
        if (process.get("restarts") or 0) >= MANY_RESTARTS:
            ended = process.get("last_exit") or {}
            text = f"{process['restarts']} restarts, the last {duration(ended.get('age_s'))} ago ({ended.get('reason')})"
            yield Finding(f"{process['role']}-{process['rank']}", "warning", text, f"llmctl logs {process['role']}-{process['rank']}")


def _changes(context: Context) -> Iterator[Finding]:
    """Whether the configuration file says something else than what runs."""
    try:
        reply = context.client.post("/v1/config/reload", {"dry_run": True}, 15.0)
    except CtlError as error:
        if error.status not in (exits.NOT_RUNNING, exits.NOT_ANSWERING, exits.LOST):
            yield Finding("reload", "warning", error.message, "llmctl config diff")
        return
    changes = [change["key"] for change in (reply.get("plan") or {}).get("changes") or []]
    if changes:
        yield Finding("reload", "warning", f"the file has changed: {', '.join(changes)}", "llmctl config diff; llmctl reload")


def _port(context: Context) -> Iterator[Finding]:
    """Whether the port that the daemon says it serves answers."""
    place = find.choose(context.client.candidates)
    url = place.lock.get("http") if place is not None and place.pid is not None else None
    if not url:
        return
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{str(url).rstrip('/')}/livez", timeout=3) as answer:
        yield Finding("port", "ok", f"{url} answers {answer.status}")


def _socket(context: Context) -> Iterator[Finding]:
    place = find.choose(context.client.candidates)
    if place is None:
        yield Finding("run directory", "warning", f"none at {', '.join(str(p.run_dir) for p in context.client.candidates)}", "it is made when llmd starts")
        return
    facts = place.run_dir.stat()
    open_to_all = stat.S_IMODE(facts.st_mode) & 0o007
    text = f"{place.run_dir} of uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}"
    yield Finding("run directory", "wrong" if open_to_all else "ok", text, "others may enter it: chmod o= it" if open_to_all else "")
    if place.pid is None and find.exists(place.socket):
        yield Finding("socket", "warning", f"{place.socket} is left over: no llmd listens on it", "it is replaced at the next start")
    elif find.exists(place.socket):
        mode = stat.S_IMODE(place.socket.lstat().st_mode)
        group = place.socket.lstat().st_gid
        name = grp.getgrgid(group).gr_name if mode & 0o060 else "nobody else"
        yield Finding("socket", "wrong" if mode & 0o007 else "ok", f"{place.socket}, mode {mode:04o}: for uid {facts.st_uid} and {name}")


def _disk(context: Context) -> Iterator[Finding]:
    seen = set()
    for what, path in _directories(context):
        there = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        state: Literal["ok", "warning", "wrong"] = "wrong" if free < NO_DISK else "warning" if free < LOW_DISK else "ok"
        text = f"{size(free) if free else 'nothing'} free for {what} in {path}"
        yield Finding("disk", state, text, "" if state == "ok" else "make room, or the log and the audit lose lines")


def _directories(context: Context) -> list[tuple[str, Path]]:
    place = find.choose(context.client.candidates)
    known = place.lock if place is not None else {}
    home = Path.home()
    found = [("logs", Path(str(known.get("log_dir") or home / ".local/state/llmd/log"))), ("models", home / ".cache/llmd")]
    return [*found, *([("sockets", place.run_dir)] if place is not None else [])]


def _memory(_: Context) -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    available = facts.get("MemAvailable", 0)
    yield Finding("memory", "ok" if available > LOW_MEMORY else "warning", f"{size(available)} of {size(facts.get('MemTotal'))} available")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        limit = path.read_text().strip() if path.exists() else "max"
        if limit.isdecimal() and int(limit) < facts.get("MemTotal", 0):
            yield Finding("cgroup", "ok", f"memory is limited to {size(int(limit))}; the KV cache is planned within it")


def _limits(_: Context) -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= FEW_FILES
    text = "as many as wanted" if hard == resource.RLIM_INFINITY else str(hard)
    yield Finding("open files", "ok" if enough else "warning", text, "" if enough else "each client takes one: LimitNOFILE= or ulimit -n")


def _gpu(_: Context) -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        yield Finding("gpu driver", "ok", driver.read_text().splitlines()[0])
    elif Path("/dev/nvidiactl").exists():
        yield Finding("gpu driver", "wrong", "there is a device, and no driver says its version", "nvidia-smi")


def _configuration(context: Context) -> Iterator[Finding]:
    """What `llmd check` finds in the configuration, the model's files and the ports: of the daemon, or of the last one that was started."""
    looked_at = meant(context, _status(context))
    if looked_at.out_of_reach:
        yield Finding("configuration", "warning", f"{looked_at.name}: only uid {looked_at.uid} and root can look as llmd does", "sudo llmctl doctor")
        return
    done = looked_at.check()
    if done.returncode == 0:
        yield Finding("configuration", "ok", f"{looked_at.name}: llmd check finds no fault")
        return
    said = [line.removeprefix("llmd: ") for line in done.stderr.splitlines() if line.strip()]
    hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), "")
    yield Finding("configuration", "wrong", f"{looked_at.name}: llmd check finds")
    *faults, last = [line for line in said if not line.startswith("hint: ")][:20] or [f"nothing, and ends with status {done.returncode}"]
    for line in faults:
        yield Finding("configuration", "wrong", line)
    yield Finding("configuration", "wrong", last, hint)


def _status(context: Context) -> dict[str, Any]:
    try:
        status = context.get("/v1/status")
    except CtlError:
        return {}
    return status if isinstance(status, dict) else {}


def _crashes(context: Context) -> Iterator[Finding]:
    place = find.choose(context.client.candidates)
    last = place.last_state if place is not None and place.pid is None else {}
    if last.get("state") == "failed":
        yield Finding("last end", "wrong", f"the last start or run failed: {last.get('reason') or 'no reason is known'}", "llmctl logs")
    since = time.time() - LATELY
    lately = [record for record in _records(context) if isinstance(record.get("at"), int | float) and record["at"] >= since]
    if lately:
        names = ", ".join(sorted({str(record.get("process")) for record in lately}))
        yield Finding("crashes", "warning", f"{counted(len(lately), 'crash', 'crashes')} within the last hour: {names}", "llmctl crashes")


def _records(context: Context) -> list[dict[str, Any]]:
    """Of crashes, from the daemon or what it left; none where it does not answer, which is a finding already."""
    try:
        records: list[dict[str, Any]] = context.get("/v1/crashes", limit=1000)["crashes"]
    except CtlError as error:
        where = statefiles.place(context.client, "crashes") if error.status == exits.NOT_RUNNING and context.client.remote is None else None
        return statefiles.read(where, 1000) if where is not None else []
    return records


_CHECKS: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    _system, _daemon, _crashes, _changes, _port, _socket, _configuration, _disk, _memory, _limits, _gpu,
)  # fmt: skip
