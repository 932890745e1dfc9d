"""The state and log directories, before anything needs them: one that was asked for and cannot be used ends the start, a default costs a WARNING."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from llmd.config import ServerArgs
from llmd.config.resolve import Dirs
from llmd.errors import ResourceError

_MODE = 0o750


def prepare(args: ServerArgs, dirs: Dirs) -> list[str]:
    """Make both. Returns what to warn of. Raises ResourceError with every fault of a directory that the configuration names."""
    for path in (dirs.state_dir, dirs.log_dir):
        try:
            Path(path).mkdir(mode=_MODE, parents=True, exist_ok=True)
        except OSError:
            pass  # judged below
    return judge(args, dirs)


def judge(args: ServerArgs, dirs: Dirs) -> list[str]:
    """The same, without making them."""
    faults, warnings = [], []
    for key, path, configured, without in (
        ("state_dir", dirs.state_dir, args.state_dir, "audit lines are lost"),
        ("log_dir", dirs.log_dir, args.log_dir, "there are no log files"),
    ):
        why = fault_of(Path(path))
        if why and configured is not None:
            faults.append(f"{key}: {path} cannot be used: {why}; set {key} to a directory that llmd may write")
        elif why:
            warnings.append(f"{path} cannot be used ({why}), so {without}: set {key}")
    if faults:
        raise ResourceError("\n".join(faults))
    return warnings


def fault_of(path: Path) -> str:
    """Why nothing can be written to a directory at `path`, which need not exist yet; empty: it can. Nothing stays behind."""
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not existing.is_dir():
        return f"{existing} is not a directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".llmd-", dir=existing):
            return ""
    except OSError as error:
        place = "" if existing == path else f"in {existing}: "
        return f"{place}{os.strerror(error.errno or 0)}"
