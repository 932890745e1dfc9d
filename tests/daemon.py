"""A whole llmd for tests: started as a person would start it, in directories of its own, on a free port, ended by pid."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from llmd.control.catalog import CATALOG

T = TypeVar("T")

#: llmctl as a command, which waits for an answer as long as a slow machine takes, where it is not the waiting that is tested.
LLMCTL = [sys.executable, "-c", "import sys, llmctl.context as c; c.READ_TIMEOUT = 60.0; from llmctl.main import main; sys.exit(main())"]

#: One factor for all time bounds of tests, for slow machines.
SLOW = float(os.environ.get("LLMD_TEST_SLOWNESS", "1"))


#: As supervision.hang_timeout and its like: soon, where a process is stopped for good, and not as soon as a busy machine lets one stand still.
HANGS = f"{1 + SLOW:g}s"


def wait_for(what: str, check: Callable[[], T], timeout: float, interval: float = 0.02) -> T:
    """Poll until `check` returns something true; fail with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout * SLOW
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(interval)


def least(measure: Callable[[], float], enough: float) -> float:
    """The shortest of up to three measurements, the first that is `enough` ends them: a machine may stand still in one, but hardly in each."""
    taken = [measure()]
    while taken[-1] > enough and len(taken) < 3:
        taken.append(measure())
    return min(taken)


def free_port() -> int:
    """A TCP port for a server that has to be told one: of those that the kernel does not give to whoever asks for any before the server binds it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(first, 32768) // 2, first)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("llmd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Brake:
    """Makes the engine's steps slow, or holds a place of llmd, until it is released (see llmd.failpoints).

    What has to be still going on when a test has come to its next line is given this, and not a time that should be long enough.
    """

    def __init__(self, directory: Path, name: str = "brake", *, on: bool = True) -> None:
        self._path = directory / name
        self.steps = f"scheduler.step=delay(200ms,{self._path})"
        """A failpoint: a thousand tokens take minutes while it is on, and no time once it is released."""
        if on:
            self.put_on()

    def holds(self, place: str) -> str:
        """A failpoint: whoever comes to `place` while it is on waits there."""
        return f"{place}=hold({self._path})"

    def put_on(self) -> None:
        self._path.touch()

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Answer:
    """What the admin plane said."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Daemon:
    """One `llmd run`. Use as a context manager, so that nothing outlives the test."""

    def __init__(self, directory: Path, *, config: dict[str, Any] | None = None, failpoints: str | None = None, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.log_path = directory / "llmd.log"
        self.config_path = directory / "llmd.yaml"
        self.failpoints = failpoints
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("LLMD_") or k == "LLMD_TEST_SLOWNESS"} | (env or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._write_config(config or {})

    def _write_config(self, config: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "state_dir": str(self.directory / "state"),
            "log_dir": str(self.directory / "log"),
            "http": {"port": 0},
        }
        for section, values in config.items():
            defaults[section] = {**defaults[section], **values} if isinstance(values, dict) and section in defaults else values
        self.config_path.write_text(json.dumps(defaults))  # JSON is YAML

    # ------------------------------------------------------------ life

    def start(self, *, ready: bool = True, timeout: float = 60) -> Daemon:
        """Start, and wait for readiness (or only for the port)."""
        argv = [sys.executable, "-m", "llmd.cli", "run", "-c", str(self.config_path)]
        env = dict(self.env)
        if self.failpoints is not None:
            argv.append("--allow-failpoints")
            env["LLMD_FAILPOINTS"] = self.failpoints
        log = self.log_path.open("ab")
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        wait_for("the port is bound", self._find_port, 20)
        if ready:
            self.wait_ready(timeout)
        return self

    def _find_port(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"llmd ended with {self.process.returncode}:\n{self.log_text()[-3000:]}")
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads((self.run_dir / "llmd.lock").read_text())
            if facts["pid"] == self.process.pid and facts["http"]:
                self.port = int(facts["http"].rsplit(":", 1)[1].rstrip("/"))
                return True
        return False

    def wait_ready(self, timeout: float = 60) -> None:
        def check() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"llmd ended with {self.process.returncode}:\n{self.log_text()[-3000:]}")
            return self.status_code("/readyz") == 200

        try:
            wait_for("readyz is 200", check, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_text()[-3000:]}") from None

    def wait_exit(self, timeout: float = 20) -> int:
        """Exit status of llmd."""
        assert self.process is not None
        return self.process.wait(timeout * SLOW)

    def stop(self, timeout: float = 20) -> int:
        """SIGTERM and the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout)

    def stop_cleanly(self, timeout: float = 20) -> None:
        """`stop`, and each process that was running then has ended with 0 too."""
        assert self.stop(timeout) == 0
        ends = re.findall(r"(\S+) \(pid \d+\) has stopped: (status \d+|signal \d+)", self.log_text())
        assert ends and [end for end in ends if end[1] != "status 0"] == [], self.log_text()[-3000:]

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        children = self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10 * SLOW)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    # ------------------------------------------------------------ looking

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def has_logged(self, *words: str) -> bool:
        """Whether one line of the log has all of `words`. What a child says comes there by way of llmd, so a moment after the child has said it."""
        return any(all(word in line for word in words) for line in self.log_text().splitlines())

    def status_code(self, path: str) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + path, timeout=5 * SLOW).status_code
        return None

    def children(self) -> list[psutil.Process]:
        """All live processes below llmd."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p for p in psutil.Process(self.process.pid).children(recursive=True) if is_alive(p)]
        return []

    def child(self, role: str, rank: int = 0) -> psutil.Process | None:
        """The live process of a role, by its place in `ps`."""
        for process in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if f"llmd.worker {role} " in title and f"--rank {rank}" in title:
                    return process
                if title.startswith(f"llmd: {role}") and (role != "frontend" or title.rstrip().endswith(f"frontend {rank}")):
                    return process
        return None

    def pid(self, role: str, rank: int = 0) -> int:
        return wait_for(f"{role} runs", lambda: self.child(role, rank), 20).pid

    def admin(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 30) -> Answer:
        """Call the admin plane. Raises OSError while control is away."""
        connection = _UnixConnection(self.run_dir / "admin.sock", timeout * SLOW)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, response.read().decode())
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """`GET /v1/status`; waits while control is being replaced."""

        def ask() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return dict(self.admin("GET", "/v1/status").json())
            return None

        return wait_for("control answers", ask, 15) or {}

    def metric(self, name: str) -> float:
        """Sum of a metric's series (exact name; labels summed over unless given in `name`). A metric that is not there is a test's mistake."""
        assert name.partition("{")[0].removesuffix("_count") in CATALOG, f"there is no metric {name}"
        total = 0.0
        for line in httpx.get(self.url + "/metrics", timeout=20 * SLOW).text.splitlines():
            if line.startswith(name) and line[len(name) : len(name) + 1] in (" ", "{", ""):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def in_flight(self) -> int:
        """Requests that the frontends hold, as status shows them."""
        return int(self.status()["in_flight"])

    def requests(self) -> tuple[int, int]:
        """(running, waiting) as status shows them."""
        now = self.status()["requests"]
        return now["running"], now["waiting"]

    # ------------------------------------------------------------ asking

    def complete(self, prompt: str = "hello", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return httpx.post(self.url + "/v1/completions", json=body, timeout=fields.pop("timeout", 60 * SLOW))

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0} | fields
        return httpx.post(self.url + "/v1/chat/completions", json=body, timeout=60 * SLOW)

    def text(self, prompt: str = "hello", **fields: Any) -> str:
        response = self.complete(prompt, **fields)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def stream(self, prompt: str = "hello", path: str = "/v1/completions", **fields: Any) -> Iterator[dict[str, Any]]:
        """Events of a streamed completion, without [DONE]; asserts that [DONE] came last."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True} | fields
        done = False
        with httpx.stream("POST", self.url + path, json=body, timeout=60 * SLOW) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    assert not done
                    yield json.loads(line[6:])
        assert done, "the stream ended without [DONE]"


def signal_another_thread(pid: int, number: signal.Signals) -> None:
    """Signal a process as the kernel may do it when its main thread has just stood still: in some other thread that does not block it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        blocked = next(int(line.split()[1], 16) for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        if int(task.name) != pid and not blocked >> (number - 1) & 1:
            assert ctypes.CDLL(None).tgkill(pid, int(task.name), int(number)) == 0
            return
    raise AssertionError("every other thread blocks it")


def gone(pids: list[int]) -> bool:
    """Whether none of these processes is alive (zombies count as gone)."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended since it was found, zombies aside: one that has just ended must not hide the others."""
    return has_status(process) not in (None, psutil.STATUS_ZOMBIE)


def has_status(process: psutil.Process) -> str | None:
    """psutil's word for what it does now; None: it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.status())
    return None


def titles(processes: list[psutil.Process]) -> dict[int, str]:
    """The command line of each that is still there, by pid."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = " ".join(process.cmdline())
    return found


def whole_lines(path: Path) -> list[str]:
    """Of a file that is being written: the last line may be half there, and is left out until its end has come."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
