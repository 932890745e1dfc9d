"""The run directory: who owns it, who holds it (one flock), what an earlier life left in it, and the last state for llmctl."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import json
import logging
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llmd.config.resolve import default_run_dir
from llmd.errors import ResourceError
from llmd.plan.ports import PortArgs
from llmd.supervisor import directories

log = logging.getLogger(__name__)

RUN_MODE = 0o750
PRIVATE_MODE = 0o700
#: State files of which it has been said that they cannot be written.
_unwritable: set[Path] = set()
_OWN = "set run_dir to a directory of llmd's own"


def prepare(ports: PortArgs, group: str | None) -> None:
    """Make RUN (0750, group `group` where we may set it) and RUN/private (0700). Raises ResourceError."""
    run_dir = Path(ports.run_dir)
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(run_dir.parent, error) from None
    _own_directory(run_dir, RUN_MODE, group)
    _own_directory(ports.private, PRIVATE_MODE, None)


def _own_directory(path: Path, mode: int, group: str | None) -> None:
    """Make or check one directory through a descriptor, so that nothing can be swapped in between."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=mode)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, error) from None
    try:
        _refuse_foreign(path, os.fstat(fd))
        if group is not None:
            # control says so once, where it sets the socket's group.
            with contextlib.suppress(KeyError, PermissionError):
                os.fchown(fd, -1, grp.getgrnam(group).gr_gid)
        os.fchmod(fd, mode)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        os.close(fd)


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ResourceError(f"{path} belongs to uid {found.st_uid}, not to uid {os.geteuid()} that llmd runs as", hint=_OWN)
    if found.st_mode & (stat.S_ISVTX | stat.S_IWOTH):
        raise ResourceError(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o})", hint=_OWN)


def judge(ports: PortArgs) -> None:
    """Whether `prepare` could do its work, without doing it. Raises ResourceError."""
    for path in (Path(ports.run_dir), ports.private):
        if os.path.lexists(path):
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise _refused(path, NotADirectoryError(errno.ENOTDIR, ""))
            _refuse_foreign(path, path.lstat())
    why = directories.fault_of(Path(ports.run_dir))
    if why:
        raise ResourceError(f"cannot use the run directory {ports.run_dir}: {why}", hint="set run_dir to a directory that llmd may write")


def _refused(path: Path, error: OSError) -> ResourceError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return ResourceError(f"{path} is not a directory (a symbolic link is not followed)", hint="remove it, or set run_dir")
    return ResourceError(f"cannot use the run directory {path}: {os.strerror(error.errno or 0)}", hint="set run_dir to a directory that llmd may write")


def _status(run_dir: Path) -> str:
    """The command that shows the llmd of a run directory, with --socket where llmctl would not look."""
    usual = str(run_dir) in ("/run/llmd", default_run_dir(os.environ))
    return "llmctl status" if usual else f"llmctl --socket {shlex.quote(str(run_dir))} status"


class Lock:
    """The one instance of a run directory. Held until the process ends; the file stays, so that llmctl can tell who it was."""

    def __init__(self, path: Path) -> None:
        """Take the lock or raise ResourceError naming the pid that has it."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ResourceError(f"cannot open the lock file {path}: {os.strerror(error.errno or 0)}") from None
        self._path = path
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ResourceError(f"the lock file {path} is not a regular file", hint="move it away; llmd does not delete what it did not make")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = self._holder()
            os.close(self._fd)
            raise ResourceError(
                f"llmd is already running in {path.parent} (pid {holder})", hint=f"see `{_status(path.parent)}`, or set another run_dir"
            ) from None

    def _holder(self) -> str:
        with contextlib.suppress(ValueError, OSError, TypeError):
            return str(json.loads(os.pread(self._fd, 4096, 0))["pid"])
        return "unknown"

    def release(self) -> None:
        """Another llmd may have the run directory."""
        os.close(self._fd)

    def write(self, facts: dict[str, object]) -> None:
        """Put who we are into the file. Raises ResourceError."""
        data = json.dumps(facts).encode() + b"\n"
        try:
            written = os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, written)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ResourceError(f"cannot write the lock file {self._path}: {os.strerror(error.errno or 0)}") from None


def clear(ports: PortArgs, admin_socket: Path | None) -> None:
    """Under the lock, in the end: remove what only a running llmd needs. The lock file and the last state stay, for llmctl."""
    kept = (ports.boot, ports.supervisord_conf, ports.control_state, ports.connections, *(each(0) for each in (ports.journal, ports.suspects)))
    shutil.rmtree(ports.small, ignore_errors=True)
    made = {path.name for path in kept}
    with contextlib.suppress(OSError):
        for path in [*([admin_socket] if admin_socket is not None else []), *_entries(ports.private)]:
            unfinished = any(path.name.startswith((f".{name}.", f"{name}.")) for name in made)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode) or path.name in made or unfinished:
                    path.unlink()


def clear_stale_sockets(ports: PortArgs, admin_socket: Path, frontends: int) -> None:
    """Under the lock: remove sockets of an earlier life. Anything else at a socket's path is an error that names it, never deleted."""
    names = ("control", "control.side", "detokenizer", *(f"tokenizer.{n}" for n in range(frontends)))
    for path in (admin_socket, ports.supervisor_socket, ports.reports, *(ports.private / name for name in names)):
        _remove_socket(path, strict=True)
    for path in _entries(ports.private):
        _remove_socket(path, strict=path.name.startswith("scheduler_input."))


def _entries(directory: Path) -> Iterable[Path]:
    return sorted(directory.iterdir())


def _remove_socket(path: Path, *, strict: bool) -> None:
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        elif strict:
            hint = "move it away; llmd does not delete what it did not make"
            raise ResourceError(f"{path} is in the way: llmd needs this path for a socket, and it is something else", hint=hint)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResourceError(f"cannot remove the stale socket {path}: {os.strerror(error.errno or 0)}") from None


def write_state(path: Path, state: str, stage: str, reason: str, at: float) -> None:
    """RUN/state.json; a disk that refuses it costs one WARNING until it works again."""
    try:
        write_file(path, json.dumps({"state": state, "stage": stage, "reason": reason, "at": at}).encode(), 0o640)
    except OSError as error:
        if path not in _unwritable:
            log.warning("cannot write %s: %s", path, os.strerror(error.errno or 0))
        _unwritable.add(path)
    else:
        _unwritable.discard(path)


def write_needed(path: Path, data: bytes) -> None:
    """`write_file` of what llmd cannot start without. Raises ResourceError naming the path."""
    try:
        write_file(path, data)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from None


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file aside, then rename it into place: a reader sees the old one or the new one."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
