"""What is done in short-lived children before any worker starts: pull an embedded model, read the model's files.

In children, so that the main process never opens a model file, never imports numpy and never has a second thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from llmd.config import ServerArgs
from llmd.errors import EXIT_CONFIG, EXIT_RESOURCE, ConfigError, GaveUp, ResourceError
from llmd.plan.spec import ModelFiles
from llmd.supervisor.os_seam import Os

#: Reading headers takes well under a second; a network file system may need more.
CHECK_DEADLINE_S = 120.0
#: pip has its own deadline inside; this one is above it.
PULL_DEADLINE_S = 2100.0
_END_S = 2.0


class Interrupted(Exception):
    """Asked to stop before there was anything to stop."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT raise Interrupted in here."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def needs_pull(args: ServerArgs, cache_dir: Path) -> bool:
    """Whether model.path is the name of a model that is not in the cache."""
    name = args.model.path
    is_name = name != "dummy" and "/" not in name and not name.endswith(".gguf") and not os.path.exists(name)
    return is_name and not (cache_dir / "models" / name / "manifest.json").exists()


def pull(name: str, cache_dir: Path, env: Mapping[str, str], os_: Os) -> None:
    """`llmd pull NAME`; its progress goes to our stderr. Raises its error."""
    argv = [sys.executable, "-m", "llmd.cli", "pull", name, "--cache-dir", str(cache_dir)]
    status, _, stderr = _run(argv, b"", env, PULL_DEADLINE_S, os_, echo=True)
    _raise_for(status, stderr, f"llmd pull {name}")


def check(args: ServerArgs, cache_dir: Path, env: Mapping[str, str], os_: Os) -> ModelFiles:
    """Read the model's files in the checking child. Raises ConfigError with every fault it found."""
    request = msgspec.json.encode({"args": args, "cache_dir": str(cache_dir)})
    status, stdout, stderr = _run([sys.executable, "-m", "llmd.store.check"], request, env, CHECK_DEADLINE_S, os_)
    _raise_for(status, stderr, "the check of the model's files")
    try:
        return msgspec.json.decode(stdout, type=ModelFiles)
    except msgspec.MsgspecError as error:
        raise GaveUp(f"the check of the model's files gave no answer: {error}") from None


def _run(argv: list[str], stdin: bytes, env: Mapping[str, str], deadline: float, os_: Os, *, echo: bool = False) -> tuple[int, bytes, str]:
    parent = os_.pid()
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if echo else subprocess.PIPE,
        env=dict(env),
        # Without a second thread this is safe, and the child dies with us.
        preexec_fn=lambda: os_.die_with_parent(parent),
        process_group=0,
    )
    try:
        stdout, stderr = child.communicate(stdin, timeout=deadline)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{' '.join(argv[1:4])} was not done after {deadline:.0f} s") from None
    finally:
        if child.poll() is None:
            os_.kill_group(child.pid, signal.SIGKILL)
            child.communicate(timeout=_END_S)
    return child.returncode, stdout, (stderr or b"").decode("utf-8", "replace")


def _raise_for(status: int, stderr: str, what: str) -> None:
    if status == 0:
        return
    lines = [line for line in stderr.splitlines() if line.strip()]
    if status == EXIT_CONFIG:
        raise ConfigError(lines or [f"{what} found the configuration unusable"])
    if status == EXIT_RESOURCE:
        raise ResourceError("\n".join(lines) or f"{what} failed")
    raise GaveUp("\n".join([f"{what} ended with status {status}", *lines[-20:]]))
