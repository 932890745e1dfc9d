"""The private run directory of an Engine: a short path, this user's alone, gone in the end; what a killed Engine left is swept by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from llmd.config.resolve import LONGEST_RUN_DIR
from llmd.errors import ResourceError

#: Younger leftovers may belong to an Engine that is just starting.
SWEEP_AGE_S: Final = 60.0
#: mkdtemp adds eight characters.
_RANDOM: Final = 8


def make() -> Path:
    """A new one. Raises ResourceError."""
    prefix = f"llmd-engine-{os.getuid()}-"
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        if len(os.fsencode(os.path.join(base, prefix))) + _RANDOM > LONGEST_RUN_DIR:
            continue
        try:
            _sweep(Path(base), prefix)
            return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        except OSError as error:
            raise ResourceError(f"cannot make a run directory in {base}: {os.strerror(error.errno or 0)}") from None
    raise ResourceError(f"the temporary directory's path is too long for sockets: {tempfile.gettempdir()}", hint="set TMPDIR to a shorter one")


def remove(path: Path) -> None:
    """Remove it; the child may be doing the same."""
    shutil.rmtree(path, ignore_errors=True)


def _sweep(base: Path, prefix: str) -> None:
    for path in base.glob(f"{prefix}*"):
        if _abandoned(path):
            remove(path)


def _abandoned(path: Path) -> bool:
    """Whether it is ours, of a while ago, and no supervisor holds its lock (one that is there takes it within a second)."""
    try:
        if path.lstat().st_uid != os.getuid() or time.time() - path.lstat().st_mtime < SWEEP_AGE_S:
            return False
        fd = os.open(path / "llmd.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
