"""Entry of every worker: `python -m llmd.worker ROLE --boot FILE --rank N`.

Sets the process up (parent death, title, stack dumps, log, failpoints), then hands over to the role's `run(context) -> exit status`.
A role's imports happen only here, so a frontend never pays for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from types import ModuleType

from llmd import failpoints
from llmd.errors import EXIT_CONFIG, EXIT_GAVE_UP, ConfigError, LlmdError, exhausted
from llmd.observability import logs
from llmd.plan.context import ENV_CRASHED, ENV_EPOCH, ENV_INCARNATION, ENV_PARENT, STACKS_SIGNAL, WorkerContext
from llmd.plan.spec import Boot

log = logging.getLogger("llmd.worker")

#: role -> module with `run(context: WorkerContext) -> int`
ROLES: dict[str, str] = {
    "control": "llmd.control.main",
    "frontend": "llmd.frontend.main",
    "detokenizer": "llmd.detokenizer.main",
    "scheduler": "llmd.scheduler.main",
}


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns its exit status."""
    parser = argparse.ArgumentParser(prog="llmd.worker")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--boot", required=True, type=Path)
    parser.add_argument("--rank", required=True, type=int)
    options = parser.parse_args(argv)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
    _check_parent()
    _raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot = Boot.load(options.boot.read_bytes())
    context = WorkerContext(
        boot=boot,
        role=options.role,
        rank=options.rank,
        incarnation=int(os.environ.get(ENV_INCARNATION, "1")),
        epoch=int(os.environ.get(ENV_EPOCH, "1")),
        crashed=os.environ.get(ENV_CRASHED) == "1",
    )
    _name_process(context)
    observability = boot.args.observability
    logs.setup(context.spec.name, observability.log_level, observability.log_format)
    if boot.failpoints:
        failpoints.arm(os.environ.get(failpoints.ENV, ""))
    return _run(context)


def _run(context: WorkerContext) -> int:
    try:
        failpoints.hit(f"{context.role}.start")
        return int(_imported(ROLES[context.role]).run(context))
    except ConfigError as error:
        for fault in error.faults:
            log.error("%s", fault)
        return EXIT_CONFIG
    except LlmdError as error:
        log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")
        return error.exit_status
    except Exception as error:
        if (told := exhausted(error)) is not None:
            log.error("%s", told.message)
            return told.exit_status
        log.exception("%s ends on an internal error", context.spec.name)
        return EXIT_GAVE_UP


def _imported(name: str) -> ModuleType:
    """A module. What an import makes stays, so that nothing is gained by looking for garbage in it, again and again; that takes a twentieth of the time."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()


def _check_parent() -> None:
    """End at once if the supervisor died before PR_SET_PDEATHSIG took effect."""
    parent = os.environ.get(ENV_PARENT)
    if parent and os.getppid() != int(parent):
        os._exit(EXIT_GAVE_UP)


def _raise_file_limit() -> None:
    """As many descriptors as the hard limit allows: each client's connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _name_process(context: WorkerContext) -> None:
    import setproctitle

    setproctitle.setproctitle(context.spec.title)


if __name__ == "__main__":
    sys.exit(main())
