"""The first words of an `llmd` process, before anything of it is imported: what it has inherited is set right.

Standard streams that are closed become /dev/null (else a log line would go into whatever file is opened next), blocked signals are let
through, and a stop that comes during the imports is a stop: there is nothing to end yet.
"""

from __future__ import annotations

import os
import signal
import sys

_STOPS = (signal.SIGTERM, signal.SIGINT)
#: Those of llmd.errors, before anything is imported.
_INTERRUPTED = 130
_RESOURCE = 71


def prepare() -> None:
    """Called once, first thing, in the main thread of a process that is llmd's own."""
    open_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def keep_status() -> None:
    """Last thing: the exit status is decided. Python takes signal handlers away when it ends, and one more signal would be the status: it is ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def open_streams() -> None:
    """Let descriptors 0, 1 and 2 be something, and sys.stdout and sys.stderr too."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def main() -> int:
    """What the command `llmd` calls."""
    if sys.argv[1:2] == ["run"]:  # before blocked signals are let through: one may be waiting
        for number in _STOPS:
            signal.signal(number, lambda *_: os._exit(0))
    prepare()
    try:
        from llmd.cli import main as llmd

        return llmd()
    except OSError as error:  # during the imports: not even those can be read
        os.write(2, f"llmd: cannot start: {error}\n".encode())
        return _RESOURCE
    except KeyboardInterrupt:
        os.write(2, b"llmd: interrupted\n")
        return _INTERRUPTED
    finally:
        keep_status()


if __name__ == "__main__":
    sys.exit(main())
