"""`llmd check`: whether the ports could be had now, and who has them. Listens nowhere."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llmd.config import ServerArgs
from llmd.config.listen import host_and_port
from llmd.errors import ResourceError
from llmd.plan.ports import PortArgs
from llmd.supervisor import sockets

#: systemd, which keeps the sockets of its .socket units.
_INIT: Final = 1


def judge(args: ServerArgs, ports: PortArgs, env: Mapping[str, str]) -> dict[str, str]:
    """Key -> a note on a port that is taken as it should be: by the llmd that runs in this run directory, or by systemd for it.

    Raises ResourceError, each fault with the key that it belongs to.
    """
    wanted = {"http.port": (args.http.host, args.http.port)} if not _passed(env) else {}
    if args.admin.listen is not None:
        wanted["admin.listen"] = host_and_port(args.admin.listen)
    notes: dict[str, str] = {}
    faults: list[ResourceError] = []
    for key, (host, port) in wanted.items():
        try:
            sockets.judge(host, port)
        except ResourceError as error:
            number = getattr(error.__cause__, "errno", None)
            pid, name = _holder(port) if number == errno.EADDRINUSE else (0, "")
            note = _rightly(pid, key, port, ports) if number == errno.EADDRINUSE else ""
            if note:
                notes[key] = note
                continue
            hint = f"pid {pid} ({name}) has it: end that, or set {key}" if pid else error.hint.replace("http.port", key)
            faults.append(ResourceError(f"{key}: {error.message}", hint=hint))
    if faults:
        hints = dict.fromkeys(fault.hint for fault in faults if fault.hint)
        raise ResourceError("\n".join(fault.message for fault in faults), hint="; ".join(hints))
    return notes


def _passed(env: Mapping[str, str]) -> bool:
    """Whether the start would be given its socket."""
    return env.get("LISTEN_PID") == str(os.getpid())


def _rightly(pid: int, key: str, port: int, ports: PortArgs) -> str:
    """Why a port that is in use is no fault; empty: it is one."""
    if pid == _INIT:
        return "  (held by systemd, for a .socket unit)"
    facts = _running(ports)
    ours = str(facts.get("http") or "").endswith(f":{port}") or key == "admin.listen"
    return f"  (in use by the llmd that runs here, pid {facts['pid']})" if facts and ours else ""


def _running(ports: PortArgs) -> dict[str, Any]:
    """What the llmd that runs in this run directory has put into its lock file; empty: none runs."""
    try:
        facts = json.loads(ports.lock.read_bytes())
        alive = b"llmd" in Path(f"/proc/{int(facts['pid'])}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return facts if alive else {}


def _holder(port: int) -> tuple[int, str]:
    """(pid, name) of who listens on a port, of another llmd its main process; (0, "") where the kernel does not tell us."""
    import psutil

    try:
        pid = next((each.pid for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,) and each.pid), None)
        if pid is None:
            return 0, ""
        process = psutil.Process(pid)
        while process.name().startswith("llmd") and (parent := process.parent()) is not None and parent.name().startswith("llmd"):
            process = parent
        return process.pid, process.name()
    except (psutil.Error, OSError):
        return 0, ""
