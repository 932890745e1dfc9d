"""`llmctl top` as a person sees it: on a terminal, against a whole llmd whose scheduler is killed and which is stopped under it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.daemon import LLMCTL, SLOW, Daemon

_ESCAPE = re.compile(r"\x1b(\[[0-9;?<>=$]*[ -/]*[@-~]|[P\]_].*?(\x1b\\|\x07)|[@-Z\\^_=>])", re.DOTALL)


class Terminal:
    """80 x 24 characters, with llmctl top on them. `said` is what has come after what was last looked for."""

    def __init__(self, daemon: Daemon) -> None:
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {name: value for name, value in daemon.env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm-256color"}
        argv = [sys.executable, "-m", "llmctl.main", "--socket", str(daemon.run_dir), "top"]
        self.process = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True)
        os.close(inner)
        self.said = ""

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def sees(self, text: str, timeout: float = 30) -> None:
        """Wait until `text` is drawn; what came before it is forgotten."""
        deadline = time.monotonic() + timeout * SLOW
        while text not in (plain := _ESCAPE.sub("", self.said)):
            assert time.monotonic() < deadline, f"never seen: {text!r} in {plain[-3000:]}"
            if select.select([self._end], [], [], 0.2)[0]:
                self.said += os.read(self._end, 65536).decode("utf-8", "replace")
        self.said = plain.partition(text)[2]

    def ended(self) -> int:
        """Its exit status; what it still draws is read, so that it is not held up."""
        deadline = time.monotonic() + 30 * SLOW
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            with contextlib.suppress(OSError):
                if select.select([self._end], [], [], 0.1)[0]:
                    os.read(self._end, 65536)
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._end)


def once(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    argv = [*LLMCTL, "--socket", str(daemon.run_dir), "top", "--once"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30 * SLOW, env=daemon.env, check=False)


def test_it_lives_through_all_that_happens_to_llmd(tmp_path: Path) -> None:
    with Daemon(tmp_path, config={"model": {"path": "dummy"}}, failpoints="") as daemon:
        daemon.start()
        terminal = Terminal(daemon)
        try:
            _watch(daemon, terminal)
        finally:
            terminal.close()


def _watch(daemon: Daemon, terminal: Terminal) -> None:
    terminal.sees("epoch 1")
    terminal.press("2")
    terminal.sees("detokenizer-0")
    terminal.press("1")
    os.kill(daemon.pid("scheduler"), signal.SIGKILL)
    terminal.sees("epoch 2")
    daemon.wait_ready()
    done = once(daemon)
    assert done.returncode == 0 and done.stdout.startswith("state ") and "detokenizer" in done.stdout and "\x1b" not in done.stdout
    terminal.press("d")
    terminal.sees("$ llmctl drain")
    terminal.sees("do it")
    terminal.press("y")
    terminal.sees("succeeded")
    terminal.press("n")
    terminal.sees("draining")
    assert daemon.status()["state"] == "draining"
    assert daemon.stop() == 0
    terminal.sees("it has ended, as asked")
    done = once(daemon)
    assert done.returncode == 3 and done.stdout.startswith("state  stopped")
    daemon.start()
    terminal.sees("live")
    assert daemon.process is not None
    daemon.process.kill()
    assert daemon.wait_exit() == -signal.SIGKILL
    terminal.sees("it was killed")
    assert once(daemon).stdout.startswith("state  died")
    terminal.press("q")
    assert terminal.ended() == 0
