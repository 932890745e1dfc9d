"""`admin.socket`, when it is configured: whether control will be able to make a socket there. Judged before anything starts."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from llmd.errors import ResourceError
from llmd.plan.ports import SOCKET_PATH_LIMIT

_HINT = "set admin.socket to a path in a directory that llmd may write, or to null"


def judge(configured: str | None) -> None:
    """Raises ResourceError naming the key and the path. Makes nothing."""
    if configured is not None and (why := fault_of(Path(configured))):
        raise ResourceError(f"admin.socket: {configured}: {why}", hint=_HINT)


def fault_of(path: Path) -> str:
    """Why there can be no socket of ours at `path`; empty: there can."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        return f"the path is {size} bytes, a socket's may have {SOCKET_PATH_LIMIT}"
    try:
        if not stat.S_ISDIR(path.parent.stat().st_mode):
            return f"{path.parent} is not a directory"
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return f"llmd may not write in {path.parent}"
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "something else is in its place, and llmd does not delete what it did not make"
    except FileNotFoundError:
        return "" if path.parent.exists() else f"there is no directory {path.parent}"
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "another program listens on it" if _answers(path) else ""


def _answers(path: Path) -> bool:
    """Whether somebody listens there: a socket that llmd has left behind is dead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Full is alive too, and so is one of another kind.
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN, errno.EPROTOTYPE)
