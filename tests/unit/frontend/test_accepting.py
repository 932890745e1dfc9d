"""One queue, several frontends: who has more lets the others go first, and nobody waits for one that does not come."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from llmd.frontend.accepting import Acceptor, Board


class Echo(asyncio.Protocol):
    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


def count(board: Board) -> int:
    return int(board._counts[board._mine])


@pytest.fixture
def boards(tmp_path: Path) -> list[Board]:
    return [Board(tmp_path / "connections", 3, n) for n in range(3)]


def test_ahead_is_who_has_clearly_more_than_another_one(boards: list[Board], tmp_path: Path) -> None:
    first, second, third = boards
    first.add(1)
    assert not first.ahead, "one more is nothing"
    first.add(1)
    assert first.ahead and not second.ahead
    second.add(2)
    assert first.ahead and second.ahead and not third.ahead
    third.add(1)
    assert not any(board.ahead for board in boards)
    again = Board(tmp_path / "connections", 3, 0)
    assert count(again) == 0 and second.ahead, "a successor begins anew"
    assert not Board(tmp_path / "alone", 1, 0).ahead


async def echo(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x")
    async with asyncio.timeout(20):
        assert await reader.readexactly(1) == b"x"
    return reader, writer


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_all_connections_are_taken_counted_and_forgotten(boards: list[Board]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        acceptors = [Acceptor(listener.dup(), board, Echo) for board in boards[:2]]  # the third is dead, its count stays at nothing
        clients = await asyncio.gather(*(echo(listener.getsockname()[1]) for _ in range(40)))
        assert sum(count(board) for board in boards) == 40
        for _, writer in clients:
            writer.close()
        await until(lambda: [count(board) for board in boards] == [0, 0, 0])
        for acceptor in acceptors:
            acceptor.close()
            acceptor._listener.close()


async def test_a_system_that_refuses_is_asked_again(boards: list[Board]) -> None:
    class Refusing:
        refusals = 3

        def __init__(self, inner: socket.socket) -> None:
            self._inner, self.fileno, self.setblocking = inner, inner.fileno, inner.setblocking

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return self._inner.accept()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = Refusing(listener)
        acceptor = Acceptor(refusing, boards[0], Echo)  # type: ignore[arg-type]
        _, writer = await echo(listener.getsockname()[1])
        assert refusing.refusals == 0
        writer.close()
        await until(lambda: count(boards[0]) == 0)
        acceptor.close()
        acceptor.close()


async def test_closed_it_takes_none(boards: list[Board]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Acceptor(listener, boards[0], Echo).close()
        client = socket.create_connection(listener.getsockname())
        with contextlib.closing(client):
            await asyncio.sleep(0.05)
            assert count(boards[0]) == 0
            listener.accept()[0].close()  # it still waits for whoever takes it
