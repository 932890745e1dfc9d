"""What is done in short-lived children before any worker starts: pull an embedded model, read the model's files.

In children, so that the main process never opens a model file, never imports numpy and never has a second thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from llmd.config import ServerArgs
from llmd.errors import EXIT_CONFIG, EXIT_RESOURCE, ConfigError, GaveUp, ResourceError, exhausted
from llmd.plan.spec import ModelFiles
from llmd.supervisor.interrupts import held
from llmd.supervisor.os_seam import Os

#: Reading headers takes well under a second; a network file system may need more.
CHECK_DEADLINE_S = 120.0
#: pip has its own deadline inside; this one is above it.
PULL_DEADLINE_S = 2100.0
_END_S = 2.0


def needs_pull(args: ServerArgs, cache_dir: Path) -> bool:
    """Whether model.path is the name of a model that is not in the cache."""
    name = args.model.path
    is_name = name != "dummy" and "/" not in name and not name.endswith(".gguf") and not os.path.exists(name)
    # os.path.exists also where the cache may not be searched, which the check of the files tells.
    return is_name and not os.path.exists(cache_dir / "models" / name / "manifest.json")


def pull(name: str, cache_dir: Path, env: Mapping[str, str], os_: Os, on_line: Callable[[str], None]) -> None:
    """`llmd pull NAME`. On a terminal it draws its own progress, elsewhere `on_line` gets what it says. Raises its error."""
    argv = [sys.executable, "-P", "-m", "llmd.cli", "pull", name, "--cache-dir", str(cache_dir)]
    terminal = os.isatty(2)
    said: list[str] = []
    with _child(argv, env, os_, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None if terminal else subprocess.PIPE) as child:
        try:
            if child.stderr is not None:
                for line in _lines(child.stderr.fileno(), PULL_DEADLINE_S):
                    text = line.removeprefix("llmd: ")
                    said.append(text)
                    on_line(text)
            status = child.wait(timeout=_END_S if child.stderr else PULL_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise ResourceError(f"llmd pull {name} was not done after {PULL_DEADLINE_S:.0f} s") from None
    _raise_for(status, "\n".join(said[-3:]) if status else "", f"llmd pull {name}")


def check(
    args: ServerArgs, cache_dir: Path, env: Mapping[str, str], os_: Os, places: Sequence[Path], *, meanwhile: Callable[[], None] = lambda: None
) -> ModelFiles:
    """Read the model's files in the checking child; their small ones come to the first of `places` that can be written.

    `meanwhile`: what can be done while the child starts. Raises ConfigError with every fault it found.
    """
    request = msgspec.json.encode({"args": args, "cache_dir": str(cache_dir), "places": [str(place) for place in places]})
    limit = min(CHECK_DEADLINE_S, args.supervision.startup_timeout)
    status, stdout, stderr = _run([sys.executable, "-P", "-m", "llmd.store.check"], request, env, limit, os_, meanwhile)
    _raise_for(status, stderr, "the check of the model's files")
    try:
        return msgspec.json.decode(stdout, type=ModelFiles)
    except msgspec.MsgspecError as error:
        raise GaveUp(f"the check of the model's files gave no answer: {error}") from None


@contextlib.contextmanager
def _child(argv: list[str], env: Mapping[str, str], os_: Os, *, stdin: int, stdout: int, stderr: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone at the end of this, also when a stop comes in the very moment in which it has been started."""
    parent = os_.pid()
    child: subprocess.Popen[bytes] | None = None
    try:
        with held() as let_go:

            def before_exec() -> None:  # without a second thread this is safe, and the child dies with us
                let_go()
                os_.die_with_parent(parent)

            try:
                child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env), preexec_fn=before_exec, process_group=0)
            except OSError as error:
                raise exhausted(error, f"cannot start {argv[3]}") or error from None
        yield child
    finally:
        if child is not None:
            with held():  # a stop that has come is raised again while it is not over
                _end(child, os_)


def _run(argv: list[str], stdin: bytes, env: Mapping[str, str], deadline: float, os_: Os, meanwhile: Callable[[], None]) -> tuple[int, bytes, str]:
    with _child(argv, env, os_, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            meanwhile()
            stdout, stderr = child.communicate(stdin, timeout=deadline)
        except subprocess.TimeoutExpired:
            raise ResourceError(f"{' '.join(argv[2:4])} was not done after {deadline:g} s") from None
    return child.returncode, stdout, stderr.decode("utf-8", "replace")


def _end(child: subprocess.Popen[bytes], os_: Os) -> None:
    """Whatever happened, the child and its own children are gone."""
    if child.poll() is None:
        os_.kill_group(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # killed it is, and what is being told already is the reason
            child.wait(timeout=_END_S)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _lines(fd: int, seconds: float) -> Iterator[str]:
    """Lines of a pipe until its end. Raises subprocess.TimeoutExpired."""
    until, rest = time.monotonic() + seconds, b""
    while True:
        if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            raise subprocess.TimeoutExpired("", seconds)
        data = os.read(fd, 65536)
        *lines, rest = (rest + data).split(b"\n")
        yield from (text for line in [*lines, *([rest] if not data else [])] if (text := line.decode("utf-8", "replace").strip()))
        if not data:
            return


def _raise_for(status: int, stderr: str, what: str) -> None:
    if status == 0:
        return
    lines = [line for line in stderr.splitlines() if line.strip()]
    if status == EXIT_CONFIG:
        raise ConfigError(lines or [f"{what} found the configuration unusable"])
    if status == EXIT_RESOURCE:
        raise ResourceError("\n".join(lines) or f"{what} failed")
    raise GaveUp("\n".join([f"{what} ended with status {status}", *lines[-20:]]))
