"""`launch_server`: llmd in this very process, from Python."""

from __future__ import annotations

import os
import threading

from llmd.config import ServerArgs
from llmd.errors import UsageError


def launch_server(server_args: ServerArgs, *, allow_failpoints: bool = False) -> int:
    """Run llmd here, in the foreground, until it is asked to stop; returns its exit status. Raises LlmdError.

    The process becomes llmd: signal handlers, logging and umask are llmd's from now on. To embed it, use `Engine`.
    """
    from llmd.supervisor.main import arm, serve

    if threading.current_thread() is not threading.main_thread():
        raise UsageError("launch_server runs in the main thread only, because it handles signals", hint="use llmd.Engine, or a process of its own")
    arm(os.environ, allow_failpoints=allow_failpoints)
    return serve(server_args, os.environ, allow_failpoints=allow_failpoints)
