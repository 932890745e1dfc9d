"""Datagrams beside a ZMQ endpoint: they arrive, or the sender knows that they do not."""

from __future__ import annotations

from pathlib import Path

from llmd.wire import sockets


def test_a_frame_arrives_with_its_senders_name(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    outlet = sockets.SideOutlet(endpoint, b"frontend-0.1")
    with sockets.side_inlet(endpoint) as inlet:
        for frame in (b"one", b"t\0wo", b""):
            assert outlet.send(frame)
            assert sockets.from_side(inlet.recv(100)) == (b"frontend-0.1", frame)
    outlet.close()


def test_a_receiver_that_is_away_is_noticed_and_its_successor_found(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    outlet = sockets.SideOutlet(endpoint, b"a")
    assert not outlet.send(b"there is none yet")
    for _ in range(2):
        with sockets.side_inlet(endpoint) as inlet:
            assert outlet.send(b"x")
            assert sockets.from_side(inlet.recv(100)) == (b"a", b"x")
        assert not outlet.send(b"it has died")
    with sockets.side_inlet(endpoint) as first:
        assert outlet.send(b"x")
        with sockets.side_inlet(endpoint):
            first.close()
            assert not outlet.send(b"that one has died, and another taken its place")
            assert outlet.send(b"y")
    outlet.close()


def test_a_receiver_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    outlet = sockets.SideOutlet(endpoint, b"a")
    with sockets.side_inlet(endpoint) as inlet:
        sent = 0
        while outlet.send(b"x" * 100):
            sent += 1
            assert sent < 1_000_000
        for _ in range(sent):
            inlet.recv(1000)
        assert outlet.send(b"y")
    outlet.close()
