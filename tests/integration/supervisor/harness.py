"""A real embedded supervisor in a process of its own, with children that do what the test says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from supervisor.xmlrpc import SupervisorTransport

from tests.daemon import whole_lines

HERE = Path(__file__).parent
SLOW = float(os.environ.get("LLMD_TEST_SLOWNESS", "1"))
_ORDER = {"frontend": 0, "scheduler": 1, "detokenizer": 2, "control": 3}


def spec(role: str, *what: str, rank: int = 0) -> dict[str, Any]:
    """One process, running `child.py WHAT...`."""
    group = "engine" if role == "scheduler" else role
    argv = [sys.executable, "-S", str(HERE / "child.py"), *what]
    return {"role": role, "rank": rank, "group": group, "stop_order": _ORDER[role], "argv": argv, "takes_socket": role == "frontend"}


def full(**what: str) -> list[dict[str, Any]]:
    """The four roles, each doing its usual thing unless told otherwise."""
    usual = {"control": "listener", "frontend": "serve", "detokenizer": "work", "scheduler": "work"}
    return [spec(role, *what.get(role, do).split()) for role, do in usual.items()]


def until(what: str, check: Callable[[], Any], timeout: float = 10) -> Any:
    """Poll for something true."""
    deadline = time.monotonic() + timeout * SLOW
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.005)
    return value


class Embedded:
    """One supervisor. The test plays control's part in RPC."""

    def __init__(self, directory: Path, specs: list[dict[str, Any]], **settings: Any) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.trace_path = directory / "trace"
        self.log_path = directory / "stderr"
        options = {name: settings.pop(name) for name in ("debug", "host") if name in settings}
        given = {"run_dir": str(self.run_dir), "log_dir": str(directory / "log"), "specs": specs, "settings": settings, **options}
        (directory / "given.json").write_text(json.dumps(given))
        self.names = [f"{s['role']}-{s['rank']}" for s in specs]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, up: bool = True, env: dict[str, str] | None = None, stderr: Any = None, **popen: Any) -> Embedded:
        whole = {**os.environ, "TRACE": str(self.trace_path), **(env or {})}
        log = self.log_path.open("ab") if stderr is None else stderr
        argv = [sys.executable, str(HERE / "embed.py"), str(self.directory / "given.json")]
        self.process = subprocess.Popen(argv, env=whole, stdout=log, stderr=log, **popen)
        if stderr is None:
            log.close()
        if up:
            until("all children are up", lambda: all(self.pid(name) for name in self.names))
        return self

    def rpc(self, method: str, *arguments: Any) -> Any:
        """One XML-RPC call, `namespace.method`."""
        url = f"unix://{self.run_dir / 'private' / 'supervisor.sock'}"
        with contextlib.closing(SupervisorTransport(None, None, url)) as transport:
            proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
            return getattr(proxy, method)(*arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        """One call in control's namespace."""
        return json.loads(self.rpc(f"llmd.{method}", json.dumps(arguments)))

    def report(self, **report: Any) -> Any:
        """One report of control's; the snapshot."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10 * SLOW)
            line.connect(str(self.run_dir / "private" / "reports.sock"))
            line.sendall(json.dumps(report).encode() + b"\n")
            with line.makefile("rb") as answers:
                answer = answers.readline()
        if not answer:
            raise ConnectionResetError("no answer to a report")
        return json.loads(answer)

    def snapshot(self) -> Any:
        """Also a report: control says that all is well, and whether READY was reached is unchanged."""
        return self.report(state="ready", progressing=True)

    def ready(self, **more: Any) -> Any:
        return self.report(state="ready", progressing=True, ready=True, **more)

    def child(self, name: str) -> Any:
        return next(p for p in self.snapshot()["processes"] if p["name"] == name)

    def pid(self, name: str) -> int:
        try:
            return int(self.child(name)["pid"])
        except (OSError, xmlrpc.client.Error):
            return 0

    def trace(self, name: str | None = None) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, whole_lines(self.trace_path)) if name in (None, line["name"])]

    def started(self, name: str) -> int:
        return sum(line["what"] == "start" for line in self.trace(name))

    def wait_started(self, name: str, times: int = 1, timeout: float = 10) -> None:
        until(f"{name} has started {times} times", lambda: self.started(name) >= times, timeout)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def supervisorctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.run_dir / "private" / "supervisord.conf"), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30 * SLOW, check=False)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = 15) -> int:
        assert self.process is not None
        return self.process.wait(timeout * SLOW)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10 * SLOW)
        psutil.wait_procs(children, timeout=5 * SLOW)


def gone(pid: int) -> bool:
    """No such process, or only its zombie."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
