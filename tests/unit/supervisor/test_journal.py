"""Lines in journald's own protocol: message, priority and fields, whatever the line is; what the journal does not take goes to stderr."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path

import pytest

from llmd.supervisor.journal import Journal, fields_of, is_journal
from llmd.supervisor.logsink import LogSink
from llmd.supervisor.os_seam import Os


def parse(datagram: bytes) -> dict[str, str]:
    """The protocol, read back."""
    fields, at = {}, 0
    while at < len(datagram):
        end = datagram.index(b"\n", at)
        key, equals, value = datagram[at:end].partition(b"=")
        at = end + 1
        if not equals:
            (size,) = struct.unpack_from("<Q", datagram, at)
            value, at = datagram[at + 8 : at + 8 + size], at + 8 + size + 1
        fields[key.decode()] = value.decode()
    return fields


def test_lines_reach_the_journal_with_their_fields(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(10)
        journal = Journal(path)
        reader, writer = os.pipe()
        sink = LogSink(Os(), None, writer, journal=journal)
        line = {
            "ts": "t",
            "level": "error",
            "role": "scheduler-0",
            "pid": 7,
            "logger": "x",
            "msg": "no\nway",
            "request_id": "job-1",
            "epoch": 3,
            "traceback": "at",
        }
        sink.feed("scheduler-0", json.dumps(line).encode() + b"\n")
        found = parse(receiver.recv(65536))
        assert found == {
            "SYSLOG_IDENTIFIER": "llmd", "LLMD_PROCESS": "scheduler-0", "MESSAGE": "scheduler-0: no\nway\nat", "PRIORITY": "3", "LLMD_LOGGER": "x",
            "LLMD_REQUEST_ID": "job-1", "LLMD_EPOCH": "3", "LLMD_PID": "7",
        }  # fmt: skip
    sink.feed("scheduler-0", b"nobody listens\n")
    os.close(writer)
    with os.fdopen(reader, "rb") as rest:
        assert rest.read() == b"nobody listens\n"
    journal.close()


@pytest.mark.parametrize(
    ("line", "priority"),
    [
        (b"2026-01-01T00:00:00.000Z ERROR   control-0: x", "3"), (b"2026-01-01T00:00:00.000Z INFO    control-0: x", "6"), (b"Fatal Python error: x", "4"),
        (b'{"level": "debug", "msg": "x"}', "7"), (b'{"broken', "4"), (b"\xff\xfe", "4"), (b'{"level": 3}', "6"),
    ],
)  # fmt: skip
def test_every_line_has_a_priority(line: bytes, priority: str) -> None:
    assert fields_of(line)["PRIORITY"] == priority


def test_only_the_stream_that_systemd_names_is_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        facts = os.fstat(file.fileno())
        assert is_journal({"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}"}, file.fileno())
        assert not is_journal({"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino + 1}"}, file.fileno())
        assert not is_journal({"JOURNAL_STREAM": "x:y"}, file.fileno()) and not is_journal({}, file.fileno())
    assert not is_journal({"JOURNAL_STREAM": "1:2"}, 987654)
