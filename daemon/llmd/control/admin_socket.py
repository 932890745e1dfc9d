"""The admin plane's unix socket, bound by ourselves: a server's own way of doing it leaves the socket open to everyone."""

from __future__ import annotations

import grp
import logging
import os
import socket
import stat
from pathlib import Path

from llmd.errors import ResourceError
from llmd.plan.ports import check_socket_path

log = logging.getLogger("llmd.control")

BACKLOG = 128


def bind(path: Path, group: str | None, *, missed: int = logging.WARNING) -> socket.socket:
    """A listening socket at `path`, 0660 for `group`, else 0600. A stale socket is replaced, anything else there never.

    `missed`: the level at which it is told that the group may not use it.
    """
    check_socket_path(path)
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ResourceError(f"{path} exists and is not a socket", hint="move it away, or set admin.socket")
        path.unlink()
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # Between bind and chmod nobody else may connect.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ResourceError(f"cannot bind the admin socket {path}: {error.strerror}") from None
    finally:
        os.umask(before)
    if group is not None:
        _give_to(path, group, missed)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _give_to(path: Path, group: str, level: int) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
        path.chmod(0o660)
    except (KeyError, OSError) as error:
        why = "does not exist" if isinstance(error, KeyError) else f"may not be set ({error.strerror})"
        hint = f"`groupadd {group}`, then start llmd again" if isinstance(error, KeyError) else "put the user that llmd runs as into it"
        log.log(level, "llmctl works for uid %d and root alone: group %r (admin.group) %s; for others: %s", os.getuid(), group, why, hint)
