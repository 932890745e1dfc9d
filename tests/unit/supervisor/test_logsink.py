"""The log sink: whole lines, the last words kept, never a blocking write, files that stay small."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmd.supervisor.logsink import FILE_LIMIT, TAIL_BYTES, LogFile, LogSink
from llmd.supervisor.os_seam import Os


class FakeOs(Os):
    """A stderr that takes what it is told to take."""

    def __init__(self) -> None:
        self.open = True
        self.written = b""
        self.budget = 10**9

    def writable(self, fd: int) -> bool:
        return self.open and self.budget > 0

    def write(self, fd: int, data: bytes) -> int:
        assert len(data) <= 4096, "more than a ready pipe is sure to take"
        taken = data[: self.budget]
        self.budget -= len(taken)
        self.written += taken
        return len(taken)


def test_lines_of_two_processes_never_mix() -> None:
    os_ = FakeOs()
    sink = LogSink(os_, None)
    for name, data in [("a", b"one "), ("b", b"three\nfo"), ("a", b"two\n"), ("b", b"ur\n"), ("a", b"no end")]:
        sink.feed(name, data)
    assert os_.written == b"three\none two\nfour\n"
    sink.finish("a")
    assert os_.written.endswith(b"four\nno end\n")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=6000)), max_size=30))
def test_no_byte_is_lost_while_somebody_reads(pieces: list[tuple[str, bytes]]) -> None:
    os_ = FakeOs()
    sink = LogSink(os_, None)
    for name, data in pieces:
        sink.feed(name, data)
    for name in "ab":
        sink.finish(name)
    sent = b"".join(data for _, data in pieces)
    assert sorted(os_.written.replace(b"\n", b"")) == sorted(sent.replace(b"\n", b""))


def test_what_nobody_reads_is_dropped_counted_and_told() -> None:
    os_ = FakeOs()
    sink = LogSink(os_, None)
    sink.feed("a", b"before\n")
    os_.open = False
    sink.feed("a", b"lost\nlost too\n")
    assert sink.dropped == 2
    os_.open = True
    sink.feed("a", b"after\n")
    assert os_.written == b"before\nllmd: 2 log lines were dropped: nobody read standard error\nafter\n"


def test_a_torn_line_is_ended_before_the_next() -> None:
    os_ = FakeOs()
    sink = LogSink(os_, None)
    os_.budget = 4096
    sink.feed("a", b"x" * 5000 + b"\n")
    os_.budget = 10**9
    sink.feed("a", b"after\n")
    assert os_.written.splitlines()[1:] == [b"llmd: 1 log lines were dropped: nobody read standard error", b"after"]


def test_the_tail_is_the_last_of_the_newest_incarnation() -> None:
    sink = LogSink(FakeOs(), None)
    for number in range(9000):
        sink.feed("a", b"line %d\n" % number)
    assert sink.tail("a", 2) == ["line 8998", "line 8999"]
    assert len("\n".join(sink.tail("a", 10**6))) <= TAIL_BYTES
    sink.forget("a")
    assert sink.tail("a") == []


def test_the_tail_shows_the_messages_of_what_is_worse_than_info() -> None:
    def line(level: str, text: str) -> bytes:
        return json.dumps({"ts": "t", "level": level, "role": "a", "pid": 1, "msg": text}).encode() + b"\n"

    sink = LogSink(FakeOs(), None)
    sink.feed("a", line("info", "begins") + line("debug", "detail"))
    assert sink.tail("a") == ["begins", "detail"]
    sink.feed("a", line("error", "the disk is full") + line("info", "ends") + b"native output\n")
    assert sink.tail("a") == ["the disk is full", "native output"]
    sink.feed("b", b"2026-01-01T00:00:00.000Z INFO    b: begins\n2026-01-01T00:00:00.000Z ERROR   b: bad\nTraceback\n")
    assert sink.tail("b") == ["bad", "Traceback"], "without what goes before a message"


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    os_ = FakeOs()
    sink = LogSink(os_, None)
    for _ in range(100):
        sink.feed("a", b"y" * 4096)
    assert len(os_.written) >= 65536


def test_files_are_rotated_once(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.log", limit=1000)
    for _ in range(10):
        file.write(b"z" * 299 + b"\n")
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert FILE_LIMIT == 8 * 2**20


def test_a_file_goes_on_where_it_was_and_reopens(tmp_path: Path) -> None:
    sink = LogSink(FakeOs(), tmp_path)
    (tmp_path / "a.log").write_bytes(b"earlier\n")
    sink.feed("a", b"one\n")
    os.rename(tmp_path / "a.log", tmp_path / "moved")
    sink.reopen()
    sink.feed("a", b"two\n")
    sink.reopen()
    assert (tmp_path / "moved").read_bytes() == b"earlier\none\n"
    assert (tmp_path / "a.log").read_bytes() == b"two\n"


def test_a_disk_that_fails_loses_lines_only(tmp_path: Path) -> None:
    os_ = FakeOs()
    sink = LogSink(os_, tmp_path / "gone")
    sink.feed("a", b"one\n")
    sink.feed("a", b"two\n")
    assert os_.written == b"llmd: %s/a.log cannot be written: No such file or directory\none\ntwo\n" % bytes(tmp_path / "gone")
    (tmp_path / "gone").mkdir()
    sink.feed("a", b"three\n")
    sink.reopen()
    assert (tmp_path / "gone/a.log").read_text() == "llmd: 2 log lines were lost: No such file or directory\nthree\n"


def test_a_pipe_that_nobody_reads_does_not_block() -> None:
    reader, writer = os.pipe()
    try:
        sink = LogSink(Os(), None, writer)
        for _ in range(100):
            sink.feed("a", b"w" * 3999 + b"\n")
        assert sink.dropped > 0
    finally:
        os.close(reader)
        os.close(writer)


def test_a_closed_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        sink = LogSink(Os(), None, writer)
        sink.feed("a", b"line\n")
        assert sink.dropped == 1
    finally:
        os.close(writer)


def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    os_ = FakeOs()
    sink = LogSink(os_, tmp_path)
    sink.feed("a", b"one\n")
    reader = os.open(tmp_path / "a.log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        sink.feed("a", b"two\n")
        assert os.read(reader, 100) == b"", "nothing is written into it, reader or no reader"
    finally:
        os.close(reader)
    assert os_.written.count(b"cannot be written") == 1
    assert b"one\n" in os_.written
    assert b"two\n" in os_.written
