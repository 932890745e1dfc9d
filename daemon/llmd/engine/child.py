"""The one child of an `Engine`: the supervisor, with a private run directory and no HTTP. `python -m llmd.engine.child PARENT_PID RUN_DIR`.

stdin: an `Order` as JSON. stdout: one line for each stage of the start, then nothing. stderr: the log. It stops at once on SIGTERM, which the
kernel also sends when the thread that started it ends, whatever ends it; nobody is left to talk to then. RUN_DIR is removed in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
from types import FrameType

import msgspec
from msgspec import Struct

from llmd.config import ServerArgs
from llmd.entry import keep_status
from llmd.errors import EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE, LlmdError

_PR_SET_PDEATHSIG = 1
#: Seconds between two looks at whether the caller still lives; and how many of them a stop may take once it does not.
_LOOK_S = 1.0
_LAST_LOOK = 15


class Order(Struct, frozen=True):
    """What to run."""

    args: ServerArgs
    allow_failpoints: bool = False


def main(argv: list[str]) -> int:
    """Returns the exit status of `llmd run`."""
    if len(argv) != 3 or not argv[1].isdecimal():
        sys.stderr.write("llmd: this module is started by llmd.Engine\n")
        return EXIT_USAGE
    parent, run_dir = int(argv[1]), argv[2]
    _reset_signals(run_dir)
    _die_with(parent)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    stages = _detach()
    try:
        return _run(order, stages)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _run(order: Order, stages: int) -> int:
    def tell(stage: str) -> None:
        with contextlib.suppress(OSError):  # the caller is gone, and so are we in a moment
            os.write(stages, f"{stage}\n".encode())

    try:
        tell("imports")
        from llmd.supervisor.main import arm, serve

        tell("configuration")
        arm(os.environ, allow_failpoints=order.allow_failpoints)
        return serve(order.args, os.environ, allow_failpoints=order.allow_failpoints, on_stage=tell)
    except LlmdError as error:
        if error.hint:
            sys.stderr.write(f"llmd: hint: {error.hint}\n")
        for line in error.message.splitlines():
            sys.stderr.write(f"llmd: {line}\n")
        return error.exit_status
    except Exception:
        import traceback

        traceback.print_exc()
        return EXIT_GAVE_UP


def _die_with(parent: int) -> None:
    """SIGTERM when the caller's thread ends; and again, should Python have lost that in a place where exceptions are ignored."""
    looks = 0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal looks
        if os.getppid() == parent:
            return
        looks += 1
        if looks > _LAST_LOOK:
            os._exit(EXIT_GAVE_UP)
        os.kill(os.getpid(), signal.SIGTERM)

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    look(signal.SIGALRM, None)


def _reset_signals(run_dir: str) -> None:
    """The caller's choices (a blocked SIGTERM, an ignored SIGCHLD) are its own. Until the supervisor handles SIGTERM there is nothing to stop."""

    def leave(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(EXIT_OK)

    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _detach() -> int:
    """stdin and stdout become /dev/null; returns the descriptor for stages, which no child of ours inherits."""
    stages = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return stages


if __name__ == "__main__":
    ended = main(sys.argv)
    keep_status()
    sys.exit(ended)
