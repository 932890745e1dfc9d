"""Opening files that lines are appended to: never a link, never a pipe or device, and so never a wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_append(path: Path, mode: int = 0o640) -> int:
    """A descriptor to append to the regular file `path`, made if it is not there. Raises OSError, and never blocks (a FIFO would)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd
