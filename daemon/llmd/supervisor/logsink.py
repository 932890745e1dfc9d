"""Where all log lines go: stderr, as long as somebody reads it, and one file a process. Never blocks.

Each process's last 32 KiB are kept for `last_exit`, for the record of a crash and for the last message of a llmd that gives up. Lines of different
processes never mix: a line is passed on when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import IO

from llmd.observability.files import open_append
from llmd.observability.lines import LineWrapper, message, telling, words
from llmd.supervisor.journal import Journal, is_journal
from llmd.supervisor.os_seam import Os

TAIL_BYTES = 32 * 1024
#: POSIX: a pipe that is ready takes this much at once.
PIPE_BUF = 4096
#: A longer line is passed on in pieces.
LINE_LIMIT = 64 * 1024
FILE_LIMIT = 8 * 2**20


class LogFile:
    """LOG/NAME.log, and LOG/NAME.log.1 before it: 8 MiB each. A disk that is full or gone loses lines, never llmd."""

    def __init__(self, path: Path, limit: int = FILE_LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._size = 0
        self.fault = ""
        """Why the last write failed."""

    def write(self, data: bytes) -> bool:
        """Append whole lines; False if they are lost."""
        try:
            if self._file is None:
                self._open()
            elif self._size + len(data) > self._limit:
                self.close()
                os.replace(self._path, f"{self._path}.1")
                self._open()
            assert self._file is not None
            written = self._file.write(data)
            self._size += written
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.fault = error.strerror or str(error)
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close; the next write opens it again (SIGUSR2: somebody has renamed it)."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        fd = open_append(self._path)
        self._file = os.fdopen(fd, "ab", buffering=0)
        self._size = os.fstat(fd).st_size


class LogSink:
    """Takes bytes by process name. `wrapper` makes each line one of the log; None: lines pass as they are.

    `terminal`: a status line (`show`) stays below what is written. `journal`: where lines go in place of stderr, which is the journal too.
    """

    def __init__(
        self, os_: Os, directory: Path | None, fd: int = 2, *, wrapper: LineWrapper | None = None, terminal: bool = False, journal: Journal | None = None
    ) -> None:
        self._journal = journal
        self._os = os_
        self._fd = fd
        self._directory = directory
        self._files: dict[str, LogFile] = {}
        self._tails: dict[str, bytes] = {}
        self._partial: dict[str, bytes] = {}
        self._pids: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._wrapper = wrapper
        self.terminal = terminal
        self._status = b""
        self._torn = False
        self._file_fault_told = False
        self.dropped = 0
        """Lines that stderr did not take."""
        self._unreported = 0

    @property
    def directory(self) -> Path | None:
        """Where the files are; None: there are none."""
        return self._directory

    def feed(self, name: str, data: bytes, pid: int = 0) -> None:
        """Output of a process, in pieces of any size."""
        self._pids[name] = pid
        self._tails[name] = (self._tails.get(name, b"") + data)[-TAIL_BYTES:]
        lines, newline, rest = (self._partial.pop(name, b"") + data).rpartition(b"\n")
        if len(rest) > LINE_LIMIT:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if rest:
            self._partial[name] = rest
        if newline:
            self._pass_on(name, lines + newline)

    def finish(self, name: str) -> None:
        """The process has ended: pass on a last line without its end."""
        rest = self._partial.pop(name, b"")
        if rest:
            self._pass_on(name, rest + b"\n")

    def forget(self, name: str) -> None:
        """A new process of that name starts: its tail begins empty."""
        self._tails.pop(name, None)

    def tail(self, name: str, lines: int = 20) -> list[str]:
        """What the last lines that a process wrote say; of these, if there are any, only WARNING and worse."""
        return [message(word) for line in telling(self._last_lines(name)) for word in words(line)][-lines:]

    def everything(self, name: str) -> list[str]:
        """What all lines say that are kept of a process."""
        return [word for line in self._last_lines(name) for word in words(line)]

    def _last_lines(self, name: str) -> list[str]:
        whole = self._tails.get(name, b"")
        if len(whole) == TAIL_BYTES:
            whole = whole.partition(b"\n")[2] or whole  # the first line has lost its beginning
        return [line for line in whole.decode("utf-8", "replace").split("\n") if line.strip()]

    def show(self, text: str) -> None:
        """Keep `text` as the last line of the terminal; empty: take it away. Nothing where stderr is no terminal."""
        status = text.encode("utf-8", "replace")
        if self.terminal and status != self._status:
            self._status = status
            self._to_stderr(b"\r\x1b[K" + status)

    def reopen(self) -> None:
        """Open the files anew."""
        self.close()

    def close(self) -> None:
        """Close the files; a line that comes later opens its own again."""
        for file in self._files.values():
            file.close()

    def _pass_on(self, name: str, lines: bytes) -> None:
        if self._wrapper is not None:
            lines = self._wrapper.wrap(name, self._pids.get(name, 0), lines)
        self._to_file(name, lines)
        if self._journal is not None:
            lines = self._to_journal(self._journal, name, lines)
            if not lines:
                return
        if self._unreported:
            note = self._note(f"{self._unreported} log lines were dropped: nobody read standard error")
            if not self._to_stderr(b"\n" + note if self._torn else note):
                self._drop(lines)
                return
            self._unreported, self._torn = 0, False
        if not self._to_stderr(b"\r\x1b[K" + lines + self._status if self._status else lines):
            self._drop(lines)

    @staticmethod
    def _to_journal(journal: Journal, name: str, lines: bytes) -> bytes:
        """Returns the lines that it has not taken."""
        return b"".join(line + b"\n" for line in lines.split(b"\n") if line and not journal.send(name, line))

    def _note(self, text: str) -> bytes:
        return self._wrapper.note(text, pid=self._os.pid()) if self._wrapper is not None else f"llmd: {text}\n".encode()

    def _to_file(self, name: str, lines: bytes) -> None:
        if self._directory is None:
            return
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = LogFile(self._directory / f"{name}.log")
        lost = self._lost.pop(name, 0)
        note = self._note(f"{lost} log lines were lost: {file.fault}") if lost else b""
        if not file.write(note + lines):
            self._lost[name] = lost + lines.count(b"\n")
            if not self._file_fault_told:
                self._file_fault_told = True
                self._to_stderr(self._note(f"{self._directory / name}.log cannot be written: {file.fault}"))

    def _to_stderr(self, data: bytes) -> bool:
        """Write all of `data` unless that would block."""
        at = 0
        while at < len(data):
            if not self._os.writable(self._fd):
                self._torn = self._torn or at > 0
                return False
            try:
                at += self._os.write(self._fd, data[at : at + PIPE_BUF])
            except OSError:
                return False
        return True

    def _drop(self, lines: bytes) -> None:
        count = lines.count(b"\n")
        self.dropped += count
        self._unreported += count


class SinkStream:
    """The text stream that llmd's own logging writes to."""

    def __init__(self, sink: LogSink, name: str) -> None:
        self._sink = sink
        self._name = name

    def write(self, text: str) -> int:
        self._sink.feed(self._name, text.encode("utf-8", "backslashreplace"), os.getpid())
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back beyond a line's end."""


def sink_for(log_dir: Path | None, os_: Os, fd: int = 2, *, wrapper: LineWrapper | None = None, fields: bool = False) -> LogSink:
    """The sink, with files in `log_dir` if it is there or can be made. `fields`: where stderr is the journal, it gets each line's fields."""
    if log_dir is not None:
        with contextlib.suppress(OSError):
            log_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    journal = Journal() if fields and is_journal(os.environ, fd) else None
    return LogSink(os_, log_dir if log_dir is not None and log_dir.is_dir() else None, fd, wrapper=wrapper, terminal=os.isatty(fd), journal=journal)
