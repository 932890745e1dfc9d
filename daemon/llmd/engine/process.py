"""The child process of an Engine: starting it, reading what it says, and `SubprocessWatchdog`, which notices its end.

All of this runs in the Engine's own thread, which lives as long as the child: the kernel ends the child when that thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from llmd.engine.child import Order
from llmd.plan.context import ENV_EPOCH, ENV_INCARNATION, ENV_PARENT

#: Lines of the child's log that are kept for the message of a failed start.
TAIL: Final = 40
_MAX_LINE: Final = 64 * 1024
#: Meant for the caller alone: systemd would take the child's words for the caller's.
_HIDDEN: Final = frozenset(
    {"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID", ENV_EPOCH, ENV_INCARNATION, ENV_PARENT}
)


class Lines:
    """Lines of a pipe, as they come, in the event loop."""

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self.drain)

    def drain(self) -> None:
        """Take what is there now."""
        try:
            while data := os.read(self._fd, _MAX_LINE):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[-_MAX_LINE:]
                for line in lines:
                    self._on_line(line.decode("utf-8", "replace"))
        except BlockingIOError:
            return
        except OSError:
            pass
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


class SubprocessWatchdog:
    """Reaps one child as soon as it ends. `on_end` is called in the event loop, once."""

    def __init__(self, process: subprocess.Popen[bytes], on_end: Callable[[], None]) -> None:
        self._process = process
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._look)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def status(self) -> int:
        """Exit status, negative for a signal; once it has ended."""
        return self._process.returncode

    def describe(self) -> str:
        """`ended with status 70`, `was killed by signal 9 (SIGKILL)`."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-self.status} ({signal.Signals(-self.status).name})"
        return f"was killed by signal {-self.status}"

    async def wait(self, patience: float) -> bool:
        """Until it has ended; False when `patience` seconds passed first."""
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)

    def _look(self) -> None:
        if self._process.poll() is None:
            return
        self._loop.remove_reader(self._pidfd)
        self._ended.set()
        self._on_end()


class Child:
    """The supervisor of one Engine."""

    def __init__(self, order: Order, *, on_stage: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Start it. Raises OSError."""
        run_dir = order.args.run_dir
        assert run_dir is not None
        env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._quiet = True
        self._process = subprocess.Popen(
            # -P: a caller's working directory may hold a `types.py`.
            [sys.executable, "-P", "-m", "llmd.engine.child", str(os.getpid()), run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C is for the caller
        )
        try:
            self._attach(order, on_stage, on_end)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def _attach(self, order: Order, on_stage: Callable[[str], None], on_end: Callable[[], None]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.watchdog = SubprocessWatchdog(self._process, on_end)
        self._pipes = (Lines(self._process.stdout.fileno(), on_stage), Lines(self._process.stderr.fileno(), self._log))
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order))
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """The end of its log; its last stages have been told then, too."""
        for pipe in self._pipes:
            pipe.drain()
        return "\n".join(self._tail)

    def speak(self) -> None:
        """From now on its log goes to our stderr as well, what it has said so far first."""
        self._quiet = False
        for line in self._tail:
            _to_stderr(line)

    async def stop(self, patience: float) -> None:
        """SIGTERM, and after `patience` seconds SIGKILL; its own children die with it."""
        if not self.watchdog.ended:
            self._process.send_signal(signal.SIGTERM)
        if not await self.watchdog.wait(patience):
            self._process.send_signal(signal.SIGKILL)
            await self.watchdog.wait(patience)

    def close(self) -> None:
        """Give back every descriptor."""
        self.watchdog.close()
        for pipe in self._pipes:
            pipe.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _log(self, line: str) -> None:
        self._tail.append(line)
        if not self._quiet:
            _to_stderr(line)


def _to_stderr(line: str) -> None:
    """Never blocks: what a full pipe does not take is dropped."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if any(event & select.POLLOUT for _, event in poller.poll(0)):
            os.write(2, line.encode()[: select.PIPE_BUF - 1] + b"\n")
