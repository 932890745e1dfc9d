"""What a start leaves in the lock file for whoever asks later how it was meant to run, `llmctl doctor` above all.

Also a start that cannot even read its configuration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from llmd import __version__
from llmd.config.convert import here
from llmd.config.load import Loaded, is_meant
from llmd.config.resolve import Dirs, resolve_dirs
from llmd.config.show import redact_url
from llmd.config.source import ConfigSource
from llmd.errors import ConfigError, LlmdError
from llmd.plan.ports import PortArgs
from llmd.supervisor import rundir


def facts(dirs: Dirs, source: ConfigSource | None, *, failpoints: bool) -> dict[str, Any]:
    """For the lock file. `config` null: a caller's own ServerArgs, with no configuration that could be read again."""
    config = None if source is None else _config(source.config_file, source.overrides, source.environ, failpoints)
    return {"pid": os.getpid(), "version": __version__, **msgspec.structs.asdict(dirs), "config": config}


def failed(error: ConfigError, config_file: str | None, overrides: tuple[str, ...], env: Mapping[str, str], *, failpoints: bool) -> None:
    """Note a configuration that is refused in the run directory that it names, else in the usual one, unless an llmd runs there. Never raises."""
    loaded = error.readable
    if not isinstance(loaded, Loaded):
        return
    dirs = resolve_dirs(loaded.args, env)
    ports = PortArgs(dirs.run_dir)
    try:
        ports.check(1)
        rundir.prepare(ports, loaded.args.admin.group)
        lock = rundir.Lock(ports.lock)
    except (LlmdError, OSError):
        return
    more = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
    named = loaded.config_file or (os.path.abspath(os.path.join(here(), config_file)) if config_file else None)
    now = time.time()
    try:
        told = {**facts(dirs, None, failpoints=failpoints), "config": _config(named, overrides, env, failpoints), "started_at": now}
        lock.write(told)
        rundir.write_state(ports.last_state, "failed", "", error.faults[0] + more, now)
    except LlmdError:
        pass  # the disk is full, say: what is wrong is told on standard error in any case
    finally:
        lock.release()


def _config(file: str | None, overrides: tuple[str, ...], environ: Mapping[str, str], failpoints: bool) -> dict[str, Any]:
    own = {name: _redacted(value) for name, value in environ.items() if is_meant(name)}
    shown = [f"{key}={_redacted(value)}" for key, _, value in (override.partition("=") for override in overrides)]
    return {"file": file, "overrides": shown, "environ": own, "directory": here(), "failpoints": failpoints}


def _redacted(value: str) -> str:
    return redact_url(value) if "://" in value else value
