"""Starts that are meant to fail or to be stopped: one `llmd run`, how it ended, how long it took, and what it left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.daemon import SLOW, titles, wait_for


@dataclass(frozen=True)
class Ended:
    """One llmd that is no more."""

    status: int
    seconds: float
    log: str
    run_dir: Path

    @property
    def last_line(self) -> str:
        """What the last line of the log says."""
        line = self.log.rstrip().rpartition("\n")[2]
        return str(json.loads(line)["msg"]) if line.startswith("{") else line


class Start:
    """One `llmd run` in directories of its own. Use as a context manager."""

    def __init__(
        self, directory: Path, config: dict[str, Any], *, failpoints: str | None = None, env: dict[str, str] | None = None, arguments: tuple[str, ...] = ()
    ) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.log_path = directory / "llmd.log"
        settings: dict[str, Any] = {"run_dir": str(self.run_dir), "state_dir": str(directory / "state"), "http": {"port": 0}, **config}
        settings["http"] = {"port": 0, **settings["http"]}
        (directory / "llmd.yaml").write_text(json.dumps(settings))
        argv = [sys.executable, "-m", "llmd.cli", "run", "-c", str(directory / "llmd.yaml"), *arguments]
        own = {name: value for name, value in os.environ.items() if not name.startswith("LLMD_")} | (env or {})
        if failpoints is not None:
            argv.append("--allow-failpoints")
            own["LLMD_FAILPOINTS"] = failpoints
        self.began = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(argv, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10 * SLOW)
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # of its parent's death
                process.kill()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def until(self, reached: Callable[[], bool], timeout: float = 20) -> None:
        """Wait until the start is somewhere."""
        deadline = time.monotonic() + timeout * SLOW
        while not reached():
            assert self.process.poll() is None, f"llmd ended with {self.process.returncode}:\n{self.log()[-3000:]}"
            assert time.monotonic() < deadline, f"not reached:\n{self.log()[-3000:]}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = 30) -> Ended:
        """Wait for the end, and check that nothing is left: no process, no socket, no lock, no file of this life."""
        status = self.process.wait(timeout * SLOW)
        ended = Ended(status, time.monotonic() - self.began, self.log(), self.run_dir)
        if status != -signal.SIGKILL:
            assert self.left() == [], f"left behind after status {status}:\n{ended.log[-3000:]}"
            assert self.family() == []
        else:
            wait_for("its processes die with it", lambda: self.family() == [], 10)
        return ended

    def family(self) -> list[psutil.Process]:
        """Every live process of this llmd, orphans included: all are in the session that was made for it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def pid_of(self, *words: str) -> int:
        """The process that has one of `words` in its command line; 0 while there is none."""
        return next((pid for pid, title in titles(self.family()).items() if any(word in title for word in words)), 0)

    def left(self) -> list[str]:
        """Sockets, a held lock, and files other than the lock and the last state, which are meant to stay."""
        if not self.run_dir.exists():
            return []
        left = [str(path) for path in self.run_dir.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode) or path.name.startswith(".")]
        left += [str(path) for path in (self.run_dir / "private").glob("*")]
        lock = self.run_dir / "llmd.lock"
        if lock.exists():
            with lock.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    left.append(f"{lock} is held")
        return left


def fails(directory: Path, config: dict[str, Any], *, timeout: float = 30, **more: Any) -> Ended:
    """A start that ends by itself."""
    with Start(directory, config, **more) as start:
        return start.end(timeout)
