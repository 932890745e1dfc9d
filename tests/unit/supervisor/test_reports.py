"""The socket on which control's reports come in, driven as supervisord's loop drives it."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor.medusa import asyncore_25 as asyncore

from llmd.supervisor.reports import WARN_EVERY, Burst, ReportSocket


def turn() -> None:
    """One round of the loop."""
    for fd, entry in list(asyncore.socket_map.items()):
        poller = select.poll()
        poller.register(fd, (select.POLLIN if entry.readable() else 0) | (select.POLLOUT if entry.writable() else 0))
        for _, events in poller.poll(0):
            try:
                if events & (select.POLLIN | select.POLLHUP):
                    entry.handle_read_event()
                if events & select.POLLOUT:
                    entry.handle_write_event()
            except Exception:
                entry.handle_error()


def turn_until_answered(client: socket.socket, lines: int = 1) -> bytes:
    client.setblocking(False)
    answer = b""
    while answer.count(b"\n") < lines:
        turn()
        try:
            data = client.recv(2**16)
        except BlockingIOError:
            continue
        assert data, "the connection has ended"
        answer += data
    return answer


@pytest.fixture
def answers() -> list[bytes]:
    return []


@pytest.fixture
def path(tmp_path: Path, answers: list[bytes]) -> Iterator[Path]:
    """A socket that answers a report with itself, unless `answers` holds something."""

    def answer(report: bytes) -> bytes:
        if report == b"bad":
            raise ZeroDivisionError
        return answers.pop(0) if answers else b"re " + report

    reports = ReportSocket(tmp_path / "reports.sock", answer)
    try:
        yield tmp_path / "reports.sock"
    finally:
        reports.close()
        assert asyncore.socket_map == {}, "nothing stays in the loop"


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    return client


def test_each_line_gets_its_answer_on_a_connection_that_is_kept(path: Path) -> None:
    with connect(path) as client:
        client.sendall(b"one\n")
        assert turn_until_answered(client) == b"re one\n"
        client.sendall(b"two\nthree\nfo")
        assert turn_until_answered(client, 2) == b"re two\nre three\n"
        client.sendall(b"ur\n")
        assert turn_until_answered(client) == b"re four\n"


def test_an_answer_that_the_socket_does_not_take_at_once_comes_whole(path: Path, answers: list[bytes]) -> None:
    answers.append(b"x" * 3_000_000)
    with connect(path) as client:
        client.sendall(b"one\n")
        assert turn_until_answered(client) == b"x" * 3_000_000 + b"\n"


def test_who_leaves_leaves_the_loop_and_others_are_served(path: Path) -> None:
    with connect(path) as other:
        for farewell in (b"", b"half a report", b"one\n", b"x" * (2**20 + 1)):
            with connect(path) as client:
                client.setblocking(False)
                for begin in range(0, len(farewell), 2**16):
                    client.sendall(farewell[begin : begin + 2**16])
                    turn()
            turn()
        other.sendall(b"two\n")
        assert turn_until_answered(other) == b"re two\n"
        turn()
    assert len(asyncore.socket_map) == 2, "the listener, and what has just been closed"
    turn()
    assert len(asyncore.socket_map) == 1


def test_a_fault_of_ours_is_logged_and_ends_that_connection_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with connect(path) as client, connect(path) as other:
        client.sendall(b"bad\n")
        for _ in range(3):
            turn()
        assert "ZeroDivisionError" in caplog.text
        assert client.recv(10) == b""
        other.sendall(b"two\n")
        assert turn_until_answered(other) == b"re two\n"


def test_who_does_not_read_answers_is_not_heard_until_it_does(path: Path, answers: list[bytes]) -> None:
    answers.extend(b"x" * 500_000 for _ in range(10))
    with connect(path) as client:
        client.sendall(b"one\n" * 10)
        for _ in range(10):
            turn()
        assert len(answers) >= 8, "no more answers are made than are taken"
        client.sendall(b"two\n")
        assert turn_until_answered(client, 11).endswith(b"\nre two\n")


def test_a_descriptor_that_is_another_s_stays_in_the_loop(path: Path) -> None:
    with connect(path):
        turn()
        [line] = [entry for entry in asyncore.socket_map.values() if not isinstance(entry, ReportSocket)]
        line.close()
        with connect(path):
            turn()  # it has the descriptor now
            known = dict(asyncore.socket_map)
            assert line not in known.values() and len(known) == 2
            line.handle_write_event()
            line.close()
            assert asyncore.socket_map == known


def nothing(path: Path) -> None:
    pass


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("put", [nothing, Path.touch, dead_socket, dangling_link])
def test_a_socket_that_somebody_removed_or_replaced_is_there_again_and_connections_stay(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = tmp_path / "reports.sock"
    listener = ReportSocket(path, bytes.upper)
    try:
        listener.restore()  # nothing to do
        with socket.socket(socket.AF_UNIX) as old, socket.socket(socket.AF_UNIX) as new:
            old.connect(str(path))
            turn()
            path.unlink()
            put(path)
            listener.restore()
            new.connect(str(path))
            for client, word in ((old, b"old"), (new, b"new")):
                client.sendall(word + b"\n")
                assert turn_until_answered(client) == word.upper() + b"\n"
    finally:
        listener.close()
    assert not asyncore.socket_map


def test_a_path_that_cannot_be_had_again_is_told_of_and_connections_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "reports.sock"
    listener = ReportSocket(path, bytes.upper)
    try:
        with socket.socket(socket.AF_UNIX) as old:
            old.connect(str(path))
            turn()
            path.unlink()
            path.mkdir()
            listener.restore()
            assert str(path) in caplog.text
            old.sendall(b"old\n")
            assert turn_until_answered(old) == b"OLD\n"
    finally:
        listener.close()
    assert not asyncore.socket_map


def test_of_a_burst_the_first_is_told_and_the_next_says_how_many_were_not() -> None:
    burst = Burst()
    assert [burst.due(5.0 + second) for second in (0, 0, 1, WARN_EVERY - 0.1, WARN_EVERY, WARN_EVERY + 1)] == [0, None, None, None, 3, None]
    assert burst.due(3 * WARN_EVERY) == 1
    assert burst.due(5 * WARN_EVERY) == 0
