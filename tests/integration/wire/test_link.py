"""A worker's heartbeats go on whatever its process runs out of, and a frozen process does not come back looking hung."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from llmd.wire import sockets
from llmd.wire.codec import Decoder, encode
from llmd.wire.messages import Command, ControlInput, Heartbeat, Totals
from llmd.wire.tables import Tables
from tests.daemon import SLOW

WORKER = """
import sys, os, resource, time
from llmd.observability.pulse import Pulse
from llmd.wire import link as module
from llmd.wire.link import WorkerLink, hello
from llmd.wire.messages import Totals
module.TELL_AGAIN_S = 1e6
pulse = Pulse(always=True)
link = WorkerLink(sys.argv[1], hello("frontend", 0, 1, 1), heartbeat=0.1, pulse=pulse, totals=Totals, on_message=print)
link.start()
link.ready()
time.sleep(0.3)
held = []
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
print("at work", flush=True)
while True:
    pulse.beat()
    time.sleep(0.05)
"""


class Peer:
    """Control's end, and one worker process."""

    def __init__(self, directory: Path, mode: str) -> None:
        endpoint = f"ipc://{directory}/control"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(endpoint)
        self.decoder: Decoder[object] = Decoder(ControlInput)
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, endpoint, mode], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"at work\n"

    def beats(self, count: int) -> list[Heartbeat]:
        """The next `count` heartbeats; what has come already is thrown away."""
        while self.socket.poll(0):
            self.socket.recv_multipart()
        return [self.beat() for _ in range(count)]

    def beat(self) -> Heartbeat:
        """The next heartbeat, of those that have come already too."""
        until = time.monotonic() + 20 * SLOW
        while True:
            assert self.socket.poll(max(0, int((until - time.monotonic()) * 1000))), "no heartbeat"
            message = self.decoder.decode(self.socket.recv_multipart()[-1])
            if isinstance(message, Heartbeat):
                return message

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture(params=["plain", "full"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path, request.param)
    yield made
    made.close()


def test_heartbeats_need_no_descriptor(peer: Peer) -> None:
    beats = peer.beats(4)
    assert beats[-1].rss_bytes > 2**20
    assert beats[-1].rss_bytes % resource.getpagesize() == 0


def test_what_control_knows_is_not_told_again(peer: Peer) -> None:
    while peer.beat().totals is not None:  # the first one that is heard tells all
        pass
    assert all(beat.totals is None and beat.tables is None for beat in peer.beats(5))
    identity = peer.socket.recv_multipart()[0]
    peer.socket.send_multipart([identity, encode(Command(id=0, verb="hello"))])  # as a control says it that does not know who this is
    whole = next(beat for beat in (peer.beat() for _ in range(300)) if beat.totals is not None or beat.tables is not None)
    assert (whole.totals, whole.tables) == (Totals(), Tables())
    assert all(beat.totals is None and beat.tables is None for beat in (peer.beat() for _ in range(5))), "once"


def test_what_tells_nothing_comes_as_a_datagram_while_somebody_takes_them(tmp_path: Path) -> None:
    made = Peer(tmp_path, "plain")
    try:
        for _ in range(2):  # a control, and the one that replaces it
            with sockets.side_inlet(f"ipc://{tmp_path}/control") as inlet:
                inlet.settimeout(20 * SLOW)
                for _ in range(3):
                    identity, frame = sockets.from_side(inlet.recv(4096))
                    beat = made.decoder.decode(frame)
                    assert identity == b"frontend-0.1"
                    assert isinstance(beat, Heartbeat) and beat.totals is None and beat.tables is None
            made.beats(3)  # nobody takes them: they come as they did before
    finally:
        made.close()


def test_a_frozen_process_is_not_to_blame_for_it(peer: Peer) -> None:
    os.kill(peer.process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert max(beat.step_age_s for beat in peer.beats(4)) < 1.5
