"""Control as a real process, between a supervisor and workers that only speak the protocols."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xmlrpc.server import SimpleXMLRPCDispatcher, SimpleXMLRPCRequestHandler

import httpx
import msgspec

from llmd.config import ServerArgs
from llmd.config.server_args import AdminArgs, HttpArgs, ModelArgs, ReloadArgs, SupervisionArgs
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles, make_plan
from llmd.wire.link import WorkerLink
from llmd.wire.messages import ClaimNames, Command, Hello, Publish, Shared
from llmd.wire.tables import Tables
from tests.daemon import SLOW

FILES = ModelFiles(
    kind="dummy", path="", name="dummy", small_dir="", weights_version="dummy@1", weights_bytes=0, context_length=128, vocab_size=258, tokenizer_size=258,
    eos_token_ids=(257,), bos_token_id=256, add_bos=False, has_chat_template=False, architecture="dummy", quantization="none",
)  # fmt: skip

READY_INFO = {"kv": {"page_size": 16, "pages_total": 100}, "max_running_requests": 4, "dtype": "float32"}


def wait_for(condition: Callable[[], Any], what: str, within: float = 15.0) -> Any:
    """Poll until `condition()` is true; its value."""
    end = time.monotonic() + within * SLOW
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {within} s: {what}")


class _Handler(SimpleXMLRPCRequestHandler):
    rpc_paths = ("/RPC2",)
    disable_nagle_algorithm = False

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer, SimpleXMLRPCDispatcher):
    daemon_threads = True
    logRequests = False

    def __init__(self, path: Path) -> None:
        SimpleXMLRPCDispatcher.__init__(self)
        socketserver.UnixStreamServer.__init__(self, str(path), _Handler)


class _Reports(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Takes lines, answers each."""

    daemon_threads = True

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        class Lines(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    for line in self.rfile:
                        self.wfile.write(answer(line) + b"\n")

        super().__init__(str(path), Lines)


class FakeSupervisor:
    """Answers reports and llmd.* over the real sockets; the test moves its picture of the processes."""

    def __init__(self, boot: Boot) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.reports: list[dict[str, Any]] = []
        self.epoch = 1
        self.stopping = False
        self.answered: dict[str, Any] = {}
        """More that its answers hold."""
        self.hangups = 0
        self.deaf = False
        self.mute = False
        """No report is answered."""
        self.drain_left_s: float | None = None
        self.pid = 1
        self.processes: dict[str, dict[str, Any]] = {
            p.name: {"name": p.name, "role": p.role, "rank": p.rank, "group": p.group, "pid": 0, "state": "starting", "incarnation": 0, "uptime_s": 0.1}
            for p in boot.processes
        }
        self._boot = boot
        calls = _Server(boot.ports.supervisor_socket)
        for name in ("kill", "restartEngine", "configure", "shutdown", "giveUp"):
            calls.register_function(self._method(name), f"llmd.{name}")
        self._servers = (calls, _Reports(boot.ports.reports, self._report))
        self._threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}) for server in self._servers]
        for thread in self._threads:
            thread.start()

    def _method(self, name: str) -> Callable[[Any], Any]:
        def method(text: Any) -> str:
            argument = json.loads(text)
            self.calls.append((name, argument))
            if self.deaf:
                wait_for(lambda: not self.deaf, "it hears again")
            return json.dumps({"ok": True, "message": "", **self.answered})

        return method

    def _report(self, line: bytes) -> bytes:
        self.reports.append(json.loads(line))
        if self.mute:
            wait_for(lambda: not self.mute, "it speaks again")
        return self._snapshot().encode()

    def _snapshot(self) -> str:
        return json.dumps({
            "start_id": self._boot.start_id, "pid": self.pid, "uptime_s": 1.0, "rss_bytes": 27_000_000, "epoch": self.epoch,
            "stopping": self.stopping, "hangups": self.hangups, "drain_left_s": self.drain_left_s, "processes": list(self.processes.values()),
        })  # fmt: skip

    def called(self, name: str) -> list[dict[str, Any]]:
        return [argument for method, argument in self.calls if method == name]

    def runs(self, name: str, pid: int, incarnation: int = 1) -> None:
        self.processes[name] |= {"pid": pid, "state": "running", "incarnation": incarnation, "restarts": incarnation - 1, "uptime_s": 0.1}

    def died(self, name: str, status: int = -9, reason: str = "signal") -> None:
        self.processes[name] |= {"pid": 0, "state": "backoff", "last_exit": {"status": status, "reason": reason, "age_s": 0.0, "stderr": "last words"}}

    def close(self) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


class FakeWorker:
    """A worker's line to control, and answers to commands: verb -> reply data, or an error code with data."""

    def __init__(self, endpoint: str, role: str, rank: int = 0, *, pid: int = 0, incarnation: int = 1, epoch: int = 1) -> None:
        self.pulse, self.meter, self.tables = Pulse(), Meter(), Tables()
        self.commands: list[Command] = []
        self.published: list[Publish] = []
        self.name = f"{role}-{rank}"
        self.shared: list[Shared] = []
        self.held: tuple[str, ...] = ()
        self.answers: dict[str, dict[str, Any] | tuple[str, dict[str, Any]] | None] = {}
        self.link = WorkerLink(
            endpoint, Hello(role=role, rank=rank, pid=pid, incarnation=incarnation, epoch=epoch),
            heartbeat=0.1, pulse=self.pulse, totals=self.meter.snapshot, on_message=self._message,
            tables=lambda: self.tables, on_shared=self.shared.append,
            introduction=lambda: [ClaimNames(id=0, names=self.held)] if self.held else [],
        )  # fmt: skip
        self.link.start()

    def _message(self, message: Command | Publish) -> None:
        if isinstance(message, Publish):
            self.published.append(message)
            return
        self.commands.append(message)
        answer = self.answers.get(message.verb, {})
        if answer is None:
            return
        if isinstance(answer, tuple):
            self.link.reply(message, answer[1], code=answer[0], message=answer[0])
        else:
            self.link.reply(message, answer)

    def verbs(self) -> list[str]:
        return [c.verb for c in self.commands]

    @property
    def last(self) -> Publish | None:
        return self.published[-1] if self.published else None


class Stage:
    """One control with everything around it."""

    def __init__(self, run_dir: Path, frontends: int = 1, **supervision: Any) -> None:
        ports = PortArgs(str(run_dir))
        ports.private.mkdir(mode=0o700)
        args = ServerArgs(
            model=ModelArgs(path="dummy"), http=HttpArgs(drain_timeout=2.0, workers=frontends), admin=AdminArgs(group=None),
            reload=ReloadArgs(timeout=60.0 * SLOW),
            supervision=SupervisionArgs(**{"heartbeat": 0.1, "startup_timeout": 20.0, **supervision}),
        )  # fmt: skip
        self.boot = Boot(
            start_id="start-1", started_at=time.time(), args=args, ports=ports, files=FILES, processes=make_plan(args, ports, threads=1),
            http_url="http://127.0.0.1:1", state_dir=str(run_dir / "state"), cache_dir=str(run_dir / "cache"), log_dir=str(run_dir / "log"),
        )  # fmt: skip
        ports.boot.write_bytes(self.boot.dump())
        self.log = run_dir / "control.log"
        self.supervisor = FakeSupervisor(self.boot)
        self.workers: list[FakeWorker] = []
        self.control: subprocess.Popen[bytes] | None = None
        self.http = self._client()

    def _client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.boot.ports.admin_socket)), base_url="http://admin", timeout=60.0 * SLOW)

    def start_control(self, incarnation: int = 1) -> subprocess.Popen[bytes]:
        env = {**os.environ, "LLMD_INCARNATION": str(incarnation), "LLMD_SUPERVISOR_PID": str(os.getpid())}
        argv = [sys.executable, "-m", "llmd.worker", "control", "--boot", str(self.boot.ports.boot), "--rank", "0"]
        with self.log.open("ab") as log:
            self.control = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
        self.supervisor.runs("control-0", self.control.pid, incarnation)
        return self.control

    def worker(self, role: str, rank: int = 0, *, pid: int, incarnation: int = 1, epoch: int = 1) -> FakeWorker:
        self.supervisor.runs(f"{role}-{rank}", pid, incarnation)
        worker = FakeWorker(self.boot.ports.control, role, rank, pid=pid, incarnation=incarnation, epoch=epoch)
        self.workers.append(worker)
        return worker

    def to_ready(self) -> tuple[FakeWorker, FakeWorker, FakeWorker]:
        """Scheduler, detokenizer and frontends ready, warm-up done. The frontend is the first one."""
        scheduler = self.worker("scheduler", pid=101)
        detokenizer = self.worker("detokenizer", pid=102)
        frontend = self.worker("frontend", pid=103)
        more = [self.worker("frontend", rank, pid=110 + rank) for rank in range(1, self.boot.args.http.workers)]
        for worker in (scheduler, detokenizer, frontend, *more):
            worker.link.ready(READY_INFO if worker is scheduler else {})
        self.wait_state("ready")
        wait_for(lambda: msgspec.msgpack.decode(self.boot.ports.control_state.read_bytes())["state"] == "ready", "a successor would know it")
        return scheduler, detokenizer, frontend

    def status(self) -> dict[str, Any]:
        """The status; empty while nobody listens (asked first, as the client leaves a socket open that cannot connect)."""
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.boot.ports.admin_socket)):
                return {}
        try:
            return dict(msgspec.json.decode(self.http.get("/v1/status").content))
        except httpx.TransportError:
            return {}

    def wait_state(self, state: str, within: float = 15.0) -> dict[str, Any]:
        """A control that has just been replaced knows it only once it has heard everybody."""

        def check() -> dict[str, Any]:
            status = self.status()
            return status if status.get("state") == state and status["stage"] != "control restarts" else {}

        return dict(wait_for(check, f"state {state}, log:\n{self.log.read_text()}", within))

    def metric(self, key: str) -> float | None:
        for line in self.http.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == key:
                return float(value)
        return None

    def kill_control(self, number: int = signal.SIGKILL) -> int:
        assert self.control is not None
        self.control.send_signal(number)
        status = self.control.wait(10 * SLOW)
        for pipe in (self.control.stdin, self.control.stdout):
            if pipe is not None:
                pipe.close()
        self.control = None
        self.http.close()
        self.http = self._client()
        return status

    def close(self) -> None:
        if self.control is not None:
            self.kill_control()
        for worker in self.workers:
            worker.link.close()
        self.supervisor.close()
        self.http.close()


@contextmanager
def stage(run_dir: Path, frontends: int = 1, **supervision: Any) -> Iterator[Stage]:
    """A Stage without its control started."""
    made = Stage(run_dir, frontends, **supervision)
    try:
        yield made
    finally:
        made.close()
