"""A daemon with nothing to do sleeps: its processes wake for their heartbeats and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.idle import books

#: Wake-ups a second that each process may have, all threads: about twice what two heartbeats a second come to.
MOST = {"supervisor": 3, "control": 12, "frontend": 11, "detokenizer": 3.5, "scheduler": 3.5}
WINDOW_S = 3.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, config={"model": {"path": "dummy"}}, failpoints="") as made:
        yield made.start()


def test_nothing_wakes_without_a_reason(daemon: Daemon) -> None:
    daemon.complete()
    assert daemon.process is not None
    pids = {"supervisor": daemon.process.pid} | {role: daemon.pid(role) for role in MOST if role != "supervisor"}
    least = dict.fromkeys(pids, float("inf"))
    for _ in range(5):  # the first may have what follows a request in it, and a busy machine what follows that
        before, began = {role: books(pid)[1] for role, pid in pids.items()}, time.monotonic()
        time.sleep(WINDOW_S)
        took = time.monotonic() - began
        least = {role: min(least[role], (books(pid)[1] - before[role]) / took) for role, pid in pids.items()}
        if all(least[role] <= most for role, most in MOST.items()):
            break
    assert {role: rate for role, rate in least.items() if rate > MOST[role]} == {}
    assert all(rate > 0 for rate in least.values())
