"""Fills in what the configuration left open: directories, and the values that follow from the model's files alone.

Pure but for reading the password database. Creates nothing; the supervisor makes the directories and checks their owner.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llmd.config.convert import here
from llmd.config.server_args import LEAST_CONTEXT, ServerArgs
from llmd.errors import ConfigError

#: Longest run directory, in bytes, whose private sockets still fit into a sockaddr_un (llmd.plan.ports checks the real paths).
LONGEST_RUN_DIR: Final = 107 - len("/private/supervisor.sock.1000000")
AUTO_MAX_RUNNING: Final = 64


class Dirs(Struct, frozen=True):
    """Where llmd keeps things; absolute."""

    run_dir: str
    state_dir: str
    cache_dir: str
    log_dir: str


class ModelFacts(Protocol):
    """What is needed of `llmd.plan.spec.ModelFiles`."""

    @property
    def name(self) -> str: ...
    @property
    def context_length(self) -> int: ...


def resolve_dirs(args: ServerArgs, environ: Mapping[str, str]) -> Dirs:
    """The four directories: as configured, else what systemd set up (RUNTIME_DIRECTORY= and its siblings), else the user's own."""
    state = _first(args.state_dir, _systemd(environ, "STATE_DIRECTORY"), _xdg(environ, "XDG_STATE_HOME", ".local/state"))
    return Dirs(
        run_dir=_first(args.run_dir, _systemd(environ, "RUNTIME_DIRECTORY"), default_run_dir(environ)),
        state_dir=state,
        cache_dir=_first(args.cache_dir, _systemd(environ, "CACHE_DIRECTORY"), _xdg(environ, "XDG_CACHE_HOME", ".cache")),
        log_dir=_first(args.log_dir, _systemd(environ, "LOGS_DIRECTORY"), os.path.join(state, "log")),
    )


def default_run_dir(environ: Mapping[str, str]) -> str:
    """$XDG_RUNTIME_DIR/llmd or llmd-UID in the temporary directory; the first that leaves room for socket paths."""
    own = f"llmd-{os.getuid()}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    temporary = os.path.join(environ.get("TMPDIR") or tempfile.gettempdir(), own)
    candidates = [os.path.join(runtime, "llmd")] if os.path.isabs(runtime) else []
    candidates += [os.path.normpath(os.path.join(here() or "/", temporary)), f"/tmp/{own}"]
    return next((path for path in candidates if len(os.fsencode(path)) <= LONGEST_RUN_DIR), candidates[-1])


def resolve_args(args: ServerArgs, files: ModelFacts, *, threads: int) -> ServerArgs:
    """`args` with every value filled in that needs no knowledge of the device. Raises ConfigError.

    `threads`: compute threads of one scheduler rank where the configuration says `auto`.
    Left open for the scheduler: the KV pool's size, `device`, and the size of a chunk, which it measures while running.
    """
    model, memory = args.model, args.memory
    context = model.context_length or files.context_length
    if context > files.context_length:
        raise ConfigError(
            f"model.context_length: {context} is more than the {files.context_length} that {files.name} was made for",
            hint=f"leave it null or set at most {files.context_length}",
        )
    if context < LEAST_CONTEXT:
        raise ConfigError(f"model.path: {files.name} was made for a context of {context} tokens; llmd serves {LEAST_CONTEXT} and more")
    float32 = model.dtype == "float32"
    return replace(
        args,
        model=replace(
            model,
            context_length=context,
            threads=threads if model.threads == "auto" else model.threads,
            quantization="none" if float32 and model.quantization == "auto" else model.quantization,
            kv_cache_dtype=("float32" if float32 else "bfloat16") if model.kv_cache_dtype == "auto" else model.kv_cache_dtype,
        ),
        memory=replace(memory, max_running_requests=AUTO_MAX_RUNNING if memory.max_running_requests == "auto" else memory.max_running_requests),
    )


def _first(configured: str | None, systemd: str | None, default: str) -> str:
    return os.path.abspath(configured or systemd or default)


def _systemd(environ: Mapping[str, str], name: str) -> str | None:
    """systemd separates several directories by colons; ours is the first."""
    return environ.get(name, "").partition(":")[0] or None


def _xdg(environ: Mapping[str, str], name: str, below_home: str) -> str:
    base = environ.get(name, "")
    if not os.path.isabs(base):
        base = os.path.join(_home(environ), below_home)
    return os.path.join(base, "llmd")


def _home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    if os.path.isabs(home):
        return home
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's uid without a passwd entry
        return os.path.join(tempfile.gettempdir(), f"llmd-{os.getuid()}")
