"""Every system call of the supervisor's own code, behind one object, so that tests can replace the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import time

_PR_SET_PDEATHSIG = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Loaded at import: a child between fork and exec must not open files.
_libc = ctypes.CDLL(None, use_errno=True)


class Os:
    """The real kernel."""

    def monotonic(self) -> float:
        """Seconds that no clock change touches."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix time, only to be shown."""
        return time.time()

    def random(self) -> float:
        """0 <= number < 1, for jitter."""
        return random.random()

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def kill_group(self, pid: int, sig: int) -> bool:
        """Signal the process group that `pid` leads, or `pid` alone where it has been forked but does not lead one yet; False when it is gone."""
        try:
            os.killpg(pid, sig)
        except (ProcessLookupError, PermissionError):
            return self.kill(pid, sig)
        return True

    def kill(self, pid: int, sig: int) -> bool:
        """Signal one process; False when it is gone."""
        try:
            os.kill(pid, sig)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def next_child(self) -> tuple[int, int] | None:
        """Reap one child: (pid, raw wait status), or None when none has ended.

        What is left of its process group is killed while the zombie still holds the number, so no stranger can be hit.
        """
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if ended is None:
            return None
        self.kill_group(ended.si_pid, signal.SIGKILL)
        return os.waitpid(ended.si_pid, 0)

    def fork(self) -> int:
        """Fork so that the child never runs this process's signal handlers: a stop that arrives before exec ends it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in signal.valid_signals():
                    with contextlib.suppress(OSError, ValueError):
                        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                            signal.signal(number, signal.SIG_DFL)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def die_with_parent(self, parent: int) -> None:
        """In a child: be killed when `parent` dies, and end now if it is dead already."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(70)

    def exec(self, argv: tuple[str, ...], env: dict[str, str], cpus: tuple[int, ...] = ()) -> None:
        """Become `argv`."""
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)
        os.execve(argv[0], argv, env)

    def writable(self, fd: int) -> bool:
        """Whether a write of at most PIPE_BUF bytes to `fd` would not block."""
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        try:
            return any(event & select.POLLOUT for _, event in poller.poll(0))
        except OSError:
            return False

    def write(self, fd: int, data: bytes) -> int:
        """os.write."""
        return os.write(fd, data)

    def read_head(self, path: str, size: int) -> bytes:
        """The first bytes of a small file, empty when there is none."""
        try:
            with open(path, "rb") as file:
                return file.read(size)
        except OSError:
            return b""

    def oom_kills(self) -> int:
        """Processes that the kernel has killed for want of memory, on this machine or in our control group; it only ever grows."""
        return _count("/proc/vmstat", "oom_kill") + _count(f"/sys/fs/cgroup{_cgroup()}/memory.events", "oom_kill")

    def cpu_s(self) -> float:
        """CPU time of this process."""
        return time.process_time()

    def rss_bytes(self, pid: int) -> int:
        """Resident memory of a process, 0 when it is gone."""
        try:
            with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
                return int(file.read(128).split()[1]) * _PAGE
        except (OSError, IndexError, ValueError):
            return 0


def _count(path: str, name: str) -> int:
    """The number behind `name` in a file of `name number` lines; 0 where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{name} ")), 0)
    except (OSError, IndexError, ValueError):
        return 0


def _cgroup() -> str:
    """Our control group, version 2; empty at the root, and where there is none."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            return next((line[3:].strip().rstrip("/") for line in file if line.startswith("0::")), "")
    except (OSError, ValueError):
        return ""
