"""Finds the daemon: which run directory, which socket, and what it left there when nobody answers.

An explicit place (`--socket`, $LLMD_SOCKET) is the only one looked at, so that a command never reaches another daemon. What is typed counts for more
than a variable: `-i` looks for its instance, whatever $LLMD_SOCKET says.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_SOCKET = "LLMD_SOCKET"
SOCKET = "admin.sock"
LOCK = "llmd.lock"
STATE = "state.json"


@dataclass(frozen=True)
class Place:
    """One place where a daemon may be."""

    run_dir: Path
    socket: Path

    @property
    def lock(self) -> dict[str, Any]:
        """What the daemon wrote when it started: pid, start_id, started_at, version, log_dir, state_dir, http, admin_socket."""
        return read_json(self.run_dir / LOCK)

    @property
    def last_state(self) -> dict[str, Any]:
        """The last state it recorded."""
        return read_json(self.run_dir / STATE)

    @property
    def last_state_age(self) -> float | None:
        """Seconds since it was recorded."""
        try:
            return round(max(0.0, time.time() - (self.run_dir / STATE).stat().st_mtime), 1)
        except OSError:
            return None

    @property
    def is_starting(self) -> bool:
        """Whether it has not come as far yet as to have a control process: what it has recorded is of the life before, or `starting`."""
        began, last = self.lock.get("started_at"), self.last_state
        if self.pid is None or not isinstance(began, int | float):
            return False
        at = last.get("at")
        return last.get("state") == "starting" or not isinstance(at, int | float) or at < began

    @property
    def pid(self) -> int | None:
        """The daemon's pid if that process is alive and is llmd."""
        pid = self.lock.get("pid")
        return pid if isinstance(pid, int) and is_llmd(pid) else None


def places(socket: str | None, instance: str | None, environ: Mapping[str, str]) -> list[Place]:
    """Where to look, in this order."""
    explicit = socket or ("" if instance else environ.get(ENV_SOCKET, ""))
    if explicit:
        return [_explicit(Path(explicit))]
    name = f"llmd-{instance}" if instance else "llmd"
    own = f"{name}-{os.getuid()}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    directories = [Path("/run") / name]
    if os.path.isabs(runtime):
        directories.append(Path(runtime) / name)
    directories.append(Path(environ.get("TMPDIR") or tempfile.gettempdir()) / own)
    directories.append(Path("/tmp") / own)
    return [_in(directory) for directory in dict.fromkeys(directories)]


def choose(candidates: list[Place]) -> Place | None:
    """The first place with a live daemon, else the first with a socket, else the first with traces of one."""
    ranked = [(p.pid is None, not exists(p.socket), not p.lock, n, p) for n, p in enumerate(candidates)]
    found = [entry for entry in ranked if not all(entry[:3])]
    return min(found, key=lambda entry: entry[:4])[-1] if found else None


def exists(path: Path) -> bool:
    """Whether something is there; a directory that may not be searched counts as yes, so that the permission is reported."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def is_llmd(pid: int) -> bool:
    """Whether `pid` is alive and is llmd; a reused pid is not. One we may not look into counts as llmd."""
    try:
        return b"llmd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none."""
    try:
        data = json.loads(path.read_bytes()[:65536])
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _explicit(path: Path) -> Place:
    return _in(path) if path.is_dir() else Place(path.parent, path)


def _in(directory: Path) -> Place:
    socket = directory / SOCKET
    if not exists(socket):
        configured = read_json(directory / LOCK).get("admin_socket")
        if isinstance(configured, str) and configured:
            socket = Path(configured)
    return Place(directory, socket)
