"""supervisord's options and system calls, as llmd needs them. Each override says which of supervisord's habits it replaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from supervisor.datatypes import SocketConfig
from supervisor.options import NotFound, ServerOptions

from llmd.errors import ResourceError
from llmd.plan.spec import ProcessSpec
from llmd.supervisor.logger import SupervisordLogger
from llmd.supervisor.os_seam import Os
from llmd.supervisor.wakeup import DeadlinePoller

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2)


class AdoptedSocket(SocketConfig):  # type: ignore[misc]
    """A socket that is open already: supervisord gets duplicates, so the port stays open whatever it closes."""

    def __init__(self, listener: socket.socket | None, backlog: int) -> None:
        self._listener = listener
        self.url = "llmd://listener"
        self.backlog = backlog

    def create_and_bind(self) -> socket.socket:
        assert self._listener is not None, "only a frontend asks, and then there is a socket"
        return self._listener.dup()


class LlmdOptions(ServerOptions):  # type: ignore[misc]
    """One embedding. `child_env(name)` gives the environment of a process that is about to start."""

    def __init__(
        self,
        conf: Path,
        specs: Mapping[str, ProcessSpec],
        *,
        os_: Os,
        listener: socket.socket | None,
        backlog: int,
        child_env: Callable[[str], dict[str, str]],
        seconds_left: Callable[[], float],
    ) -> None:
        super().__init__()
        self._specs = specs
        self._os = os_
        self._parent = os.getpid()
        self._adopted = AdoptedSocket(listener, backlog)
        self._child_env = child_env
        self._ended: dict[int, int] = {}
        self.interrupts = 0
        """SIGINTs received; supervisord's own queue holds each signal only once."""
        self.spawn_error: OSError | None = None
        """Why the latest process could not be started, where the system refused."""
        self.poller = DeadlinePoller(self, seconds_left)
        self.first = True
        self.test = False
        self.realize(["-n", "-c", str(conf)], doc="")

    def usage(self, msg: object) -> NoReturn:
        """supervisord ends with status 2 here, which means a bad command line."""
        raise ResourceError(f"supervisord cannot start: {msg}")

    def make_logger(self) -> None:
        """supervisord logs to stdout and to a file in the working directory."""
        self.logger = SupervisordLogger()

    def write_pidfile(self) -> None:
        """The lock file is llmd's."""

    def cleanup_fds(self) -> None:
        """Nothing leaks: every descriptor of ours closes on exec."""

    def parse_fcgi_socket(self, *_: Any) -> AdoptedSocket:
        """supervisord would bind again, IPv4 only."""
        return self._adopted

    def setsignals(self) -> None:
        """As supervisord's, and SIGINTs are counted."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        self.signal_receiver.receive(number, frame)

    def check_execv_args(self, filename: str, argv: list[str], st: Any) -> None:
        """The file's command is a token; what will run is in the plan."""
        program = self._program(argv[1])
        super().check_execv_args(program, argv, os.stat(program))

    def _program(self, name: str) -> str:
        found = shutil.which(self._specs[name].argv[0])
        if found is None:
            raise NotFound(f"can't find command {self._specs[name].argv[0]!r}")
        return found

    def fork(self) -> int:
        """supervisord's child would run, until exec, the parent's handlers, and lose a stop."""
        with self._noting():
            return self._os.fork()

    def make_pipes(self, stderr: bool = True) -> Any:
        """supervisord makes an error of the system a sentence of its own."""
        with self._noting():
            return super().make_pipes(stderr)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.spawn_error = error
            raise

    def execve(self, filename: str, argv: list[str], env: dict[str, str]) -> None:
        """The last call in the child: after it nothing resets the parent-death signal."""
        self._os.die_with_parent(self._parent)
        spec = self._specs[argv[1]]
        supervisord_env = {key: value for key, value in env.items() if key.startswith("SUPERVISOR_")}
        self._os.exec((self._program(spec.name), *spec.argv[1:]), {**self._child_env(spec.name), **supervisord_env}, spec.cpus)

    def waitpid(self) -> tuple[int | None, int | None]:
        """Keeps the raw status, which supervisord reduces to -1 for any signal."""
        ended = self._os.next_child()
        if ended is None:
            return None, None
        self._ended[ended[0]] = ended[1]
        return ended

    def exit_code(self, pid: int) -> int | None:
        """Status of an ended child, negative for a signal; asked once the child is reaped, while supervisord still handles it."""
        raw = self._ended.get(pid)
        return None if raw is None else os.waitstatus_to_exitcode(raw)

    def forget(self, pid: int) -> None:
        """The end of `pid` has been handled."""
        self._ended.pop(pid, None)
