"""Write a bundle for support: state, processes, requests (ids and numbers), configuration, operations, audit, events, metrics, the ends of the logs, and what
`doctor` finds. No prompts, no outputs, no secrets: what looks like a key is replaced by ***. Also when llmd is down: then it holds what is left.

The file is for you alone (mode 0600); look into it before you give it away. It unpacks into a directory llmd-report-HOST-TIME.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import time
from pathlib import Path
from typing import Any

from llmctl import exits, find, statefiles
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import size
from llmctl.verbs import _checks
from llmd import __version__

#: Bytes of each log that go in, from its end.
LOG_BYTES = 2**20
READS = ("status", "processes", "kv", "requests", "weights", "config", "operations", "events?follow=false")
#: Records of crashes and lines of the audit at most.
AUDIT_LINES = 1000
#: Words before a secret, and what secrets look like by themselves.
_SECRETS = re.compile(
    rb"(?i)((?:authorization|api[-_]?key|password|passwd|secret|token|bearer)[\"']?\s*[:=]\s*[\"']?(?:bearer\s+)?)[^\s\"',;}]{4,}|\b(sk|hf|ghp)[-_][A-Za-z0-9_-]{16,}"
)


def run(context: Context) -> int:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(context.options.file or f"llmd-report-{stamp}.tar.gz")
    # A directory of its own, whatever the file is called: unpacked, it must never land on the file itself.
    directory = f"llmd-report-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node()) or 'host'}-{stamp}"
    files = _collect(context)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CtlError(exits.BAD_INPUT, f"{path} is there already", "give another --output-file") from None
    except OSError as error:
        raise CtlError(exits.BAD_INPUT, f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{directory}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    if context.out.is_table:
        context.out.line(f"{path}  {size(path.stat().st_size)}, {len(files)} files; look into it before you give it away")
    else:
        context.out.data({"file": str(path.absolute()), "bytes": path.stat().st_size, "files": sorted(files)})
    return exits.OK


def _collect(context: Context) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for read in READS:
        name = f"{read.partition('?')[0]}.json"
        files[name] = _clean(_json(_answer(context, f"/v1/{read}")))
    for name in ("audit", "crashes"):
        files[f"{name}.json"] = _clean(_json(_left(context, name)))
    try:
        files["metrics.txt"] = context.client.text("/metrics", 5.0).encode()
    except CtlError as error:
        files["metrics.txt"] = f"# {error.message}\n".encode()
    files["doctor.json"] = _clean(_json([finding.__dict__ for finding in _checks.all_of(context)]))
    files["system.json"] = _json(_system())
    for candidate in context.client.candidates:
        for path in (candidate.run_dir / find.LOCK, candidate.run_dir / find.STATE):
            if data := _tail(path):
                files[f"run/{candidate.run_dir.name}/{path.name}"] = _clean(data)
    place = find.choose(context.client.candidates)
    directory = Path(str(place.lock.get("log_dir") or "")) if place is not None else Path()
    for path in sorted(directory.glob("*.log")) if directory.is_absolute() else ():
        files[f"log/{path.name}"] = _clean(_tail(path))
    return files


def _left(context: Context, name: str) -> Any:
    """What `crashes` or `audit` says; where llmd is not running, what lies in the state directory."""
    try:
        return context.client.get(f"/v1/{name}", 5.0, limit=AUDIT_LINES)
    except CtlError as error:
        where = statefiles.place(context.client, name) if error.status == exits.NOT_RUNNING and context.client.remote is None else None
        if where is None:
            return {"error": error.message}
        return {"read_from": str(where), name: statefiles.read(where, AUDIT_LINES)}


def _answer(context: Context, path: str) -> Any:
    try:
        return context.client.get(path, 5.0)
    except CtlError as error:
        return {"error": error.message}


def _system() -> dict[str, Any]:
    reads = {
        name: _tail(Path(name)).decode("utf-8", "replace") for name in ("/proc/meminfo", "/proc/loadavg", "/etc/os-release", "/proc/driver/nvidia/version")
    }
    names = sorted(name for name in os.environ if name.startswith(("LLMD_", "CUDA_", "OMP_", "MKL_")))
    return {
        "uname": " ".join(platform.uname()),
        "python": platform.python_version(),
        "llmctl": __version__,
        "cpus": os.cpu_count(),
        "environment": names,
        **reads,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str).encode() + b"\n"


def _clean(data: bytes) -> bytes:
    return _SECRETS.sub(lambda match: (match[1] or b"") + b"***", data)


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - LOG_BYTES))
            return stream.read(LOG_BYTES)
    except OSError:
        return b""
