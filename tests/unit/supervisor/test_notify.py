"""sd_notify: what is said, how often, and that an odd socket harms nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.supervisor.notify import Notifier


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.setblocking(False)
        yield made


def received(receiver: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(receiver.recv(4096).decode())
        except BlockingIOError:
            return found


def test_ready_and_stopping_once_status_on_change(receiver: socket.socket, tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PATH": "kept"}
    notifier = Notifier(environ)
    assert environ == {"PATH": "kept"}
    for _ in range(2):
        notifier.status("loading\nREADY=1")
        notifier.ready()
        notifier.stopping()
    assert received(receiver) == ["STATUS=loading READY=1", "READY=1", "STOPPING=1"]


def test_an_abstract_address() -> None:
    name = f"llmd-test-{os.getpid()}-{id(object())}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("kind", ["missing", "long", "file", "relative", "vsock", "full"])
def test_an_odd_socket_gives_one_warning(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, receiver: socket.socket) -> None:
    (tmp_path / "file").write_text("")
    address = {
        "missing": "/nonexistent/notify",
        "long": "/" + "x" * 200,
        "file": str(tmp_path / "file"),
        "relative": "notify",
        "vsock": "vsock:2:1",
        "full": str(tmp_path / "notify"),
    }[kind]
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})
    with caplog.at_level(logging.WARNING):
        for number in range(2000 if kind == "full" else 3):
            notifier.status(str(number))
        notifier.ready()
    assert len(caplog.records) == 1


def fill(address: str) -> None:
    """So that nothing more is taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"noise", address)


def test_what_a_full_socket_does_not_take_is_sent_again_in_order(receiver: socket.socket, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "10000000"})
    fill(address)
    notifier.extend(10.0)
    notifier.status("loading")
    notifier.ready()
    for _ in range(3):
        notifier.reloading(True)
        notifier.reloading(False)
    notifier.status("ready")
    notifier.tick(0.0, True)
    notifier.stopping()
    woken = notifier.next_wake(True)
    assert woken is not None and woken < 5.0 + time.monotonic()
    assert set(received(receiver)) == {"noise"}
    notifier.tick(1.0, False)
    words = [word.partition("\n")[0] for word in received(receiver)]
    assert words == ["READY=1", "RELOADING=1", "READY=1", "STATUS=ready", "WATCHDOG=1", "STOPPING=1"]
    notifier.tick(2.0, False)
    assert received(receiver) == [] and notifier.next_wake(False) is None


def test_a_dead_socket_is_not_tried_for_ever(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    notifier.ready()
    assert notifier.next_wake(True) is None


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_systemd_nothing_is_said(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier(dict(environ))
    notifier.ready()
    notifier.tick(0.0, True)
    assert caplog.records == []
    assert notifier.next_wake(True) is None


def test_the_watchdog_is_pinged_at_half_its_time_while_all_is_well(receiver: socket.socket, tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())})
    for second in range(21):
        notifier.tick(float(second), healthy=second < 12)
    assert received(receiver) == ["WATCHDOG=1"] * 3
    assert notifier.next_wake(True) == 15.0


@pytest.mark.parametrize("variables", [{"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}])
def test_a_watchdog_that_is_not_ours_or_makes_no_sense_is_ignored(variables: dict[str, str]) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/x", **variables}).watchdog_period is None
