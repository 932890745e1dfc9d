"""Lines to journald in its own protocol, where standard error is the journal: each with its priority and fields, for `journalctl LLMD_PROCESS=scheduler-0`.

Protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/. One datagram a line, never waiting; a line that the journal does not take goes the ordinary way.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

SOCKET: Final = "/run/systemd/journal/socket"
#: Set by systemd for what it starts: device and inode of the stream that is the journal (systemd.exec(5)).
ENV: Final = "JOURNAL_STREAM"
#: Bytes of one message; a socket's buffer has 200 KiB and more.
MAX_MESSAGE: Final = 48 * 1024

#: Syslog's numbers (RFC 5424, 6.2.1).
PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
#: Keys of a JSON line -> fields of the journal.
_FIELDS: Final = {"logger": "LLMD_LOGGER", "request_id": "LLMD_REQUEST_ID", "rid": "LLMD_RID", "operation_id": "LLMD_OPERATION_ID", "epoch": "LLMD_EPOCH"}
_TEXT: Final = re.compile(rb"\d{4}-\d\d-\d\dT\S+ +([A-Z]+) +[^:]+: ")


def is_journal(environ: Mapping[str, str], fd: int = 2) -> bool:
    """Whether `fd` is what systemd says the journal is."""
    device, _, inode = environ.get(ENV, "").partition(":")
    if not (device.isdecimal() and inode.isdecimal()):
        return False
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (int(device), int(inode))


class Journal:
    """The socket. `send` never blocks and never raises."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, name: str, line: bytes) -> bool:
        """One line of a process, without its end. False if the journal did not take it."""
        fields = {"SYSLOG_IDENTIFIER": "llmd", "LLMD_PROCESS": name, **fields_of(line)}
        try:
            self._socket.sendto(b"".join(_field(key, value) for key, value in fields.items()), self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def fields_of(line: bytes) -> dict[str, str]:
    """MESSAGE, PRIORITY and whatever else a line tells, be it JSON or text."""
    parsed = _parsed(line)
    if parsed is None:
        level = _TEXT.match(line)
        priority = PRIORITIES.get(level[1].decode().lower(), PRIORITIES["info"]) if level else PRIORITIES["warning"]
        return {"MESSAGE": line[:MAX_MESSAGE].decode("utf-8", "replace"), "PRIORITY": str(priority)}
    message = f"{parsed.get('role')}: {parsed.get('msg')}" + (f"\n{parsed['traceback']}" if parsed.get("traceback") else "")
    fields = {"MESSAGE": message[:MAX_MESSAGE], "PRIORITY": str(PRIORITIES.get(str(parsed.get("level")), PRIORITIES["info"]))}
    fields |= {field: str(parsed[key]) for key, field in _FIELDS.items() if parsed.get(key) is not None}
    return {**fields, "LLMD_PID": str(parsed.get("pid", ""))}


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _field(key: str, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return key.encode() + b"=" + data + b"\n"
    return key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
