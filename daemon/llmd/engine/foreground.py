"""`launch_server`: llmd in this very process, from Python. When it is over, the process is the caller's again, as it was."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator

from llmd import failpoints
from llmd.config import ServerArgs
from llmd.errors import UsageError

#: What the supervisor may raise.
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)


def launch_server(server_args: ServerArgs, *, allow_failpoints: bool = False) -> int:
    """Run llmd here, in the foreground, until it is asked to stop. Returns its exit status, whatever ended it; the reason is on standard error.

    Meanwhile the process is llmd: signal handlers, logging, umask and child processes are llmd's. To embed it, use `Engine`.
    Raises TypeError for arguments that are no ServerArgs, UsageError outside of the main thread; nothing has been done then.
    """
    from llmd.cli import guarded
    from llmd.supervisor.main import arm, serve

    if not isinstance(server_args, ServerArgs):
        raise TypeError(f"launch_server takes a ServerArgs, got {type(server_args).__name__}; ServerArgs.from_kwargs(model_path=...) makes one")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("launch_server runs in the main thread only, because it handles signals", hint="use llmd.Engine, or a process of its own")

    def run() -> int:
        arm(os.environ, allow_failpoints=allow_failpoints)
        return serve(server_args, os.environ, allow_failpoints=allow_failpoints)

    with _borrowed():
        return guarded(run)


@contextlib.contextmanager
def _borrowed() -> Iterator[None]:
    """All that a supervisor changes in its process and does not give back itself, because its own process ends with it."""
    import setproctitle

    from llmd.observability import logs

    title, environ = setproctitle.getproctitle(), dict(os.environ)
    umask = os.umask(0o077)
    os.umask(umask)
    limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
    handlers = {number: handler for number in signal.valid_signals() if (handler := signal.getsignal(number)) is not None}
    try:
        with logs.unchanged():
            yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for kind, limit in limits.items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, limit)
        os.umask(umask)
        os.environ.clear()
        os.environ.update(environ)
        setproctitle.setproctitle(title)
        failpoints.arm("")
