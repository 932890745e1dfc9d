"""Clients that read slowly, not at all, or leave: bounded memory, an end, and nothing left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.daemon import SLOW, Daemon, wait_for

SLOW_READERS = 20
OUTCOME = 'llmd_requests_total{endpoint="/v1/completions",outcome="slow_client"}'


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    config = {"model": {"path": "dummy"}, "http": {"stream_write_timeout": "2s"}, "scheduler": {"max_queued_requests": 1000}}
    with Daemon(tmp_path, config=config, failpoints="").start() as running:
        yield running


def slow_reader(daemon: Daemon, number: int) -> socket.socket:
    body = json.dumps({"prompt": f"slow {number} ", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 2}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", daemon.port))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    return raw


def test_slow_readers_cost_little_and_are_cut(daemon: Daemon) -> None:
    daemon.text("warm", max_tokens=200)
    frontend = psutil.Process(daemon.pid("frontend"))
    before = frontend.memory_info().rss
    readers = [slow_reader(daemon, number) for number in range(SLOW_READERS)]
    deadline = time.monotonic() + 60 * SLOW
    while daemon.metric(OUTCOME) < SLOW_READERS:
        assert time.monotonic() < deadline, "the slow readers are not cut"
        for reader in readers:
            with contextlib.suppress(OSError):
                reader.recv(10)
        assert daemon.text("beside them", max_tokens=11) == "beside them"
        assert frontend.memory_info().rss - before < 50 * 2**20
        time.sleep(0.2)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 10)
    wait_for("no page is in use", lambda: daemon.status()["kv"]["pages_active"] == 0, 5)
    for reader in readers:
        reader.close()


async def _request(client: httpx.AsyncClient, chance: random.Random) -> None:
    """One of several kinds; every fifth client leaves before its answer is there."""
    streamed, leaves = chance.random() < 0.5, chance.random() < 0.2
    kinds = [
        ("/v1/completions", {"prompt": "some words " * chance.randint(1, 20), "stop": chance.choice([None, "ds so", "never"])}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "x", "n": 0}),
    ]
    path, body = chance.choice(kinds)
    body |= {"stream": streamed, "max_tokens": 2000 if leaves else chance.randint(1, 20), "ignore_eos": True}
    try:
        async with asyncio.timeout(0.02 if leaves else 60 * SLOW), client.stream("POST", path, json=body) as answer:
            assert answer.status_code == (400 if body.get("n") == 0 else 200)
            async for _ in answer.aiter_bytes():
                pass
    except TimeoutError:
        assert leaves


def mixed(daemon: Daemon, count: int) -> None:
    async def all_of_them() -> None:
        chance, room = random.Random(count), asyncio.Semaphore(32)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=60 * SLOW) as client:

            async def one() -> None:
                async with room:
                    await _request(client, chance)

            await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())


def nothing_is_left(daemon: Daemon, count: int) -> None:
    """After a warm-up of the same kind, `count` mixed requests leave no page, descriptor, state or memory behind."""
    mixed(daemon, 300)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 10)
    processes = {role: psutil.Process(daemon.pid(role)) for role in ("frontend", "scheduler", "detokenizer")}
    time.sleep(1)
    before = {role: (process.num_fds(), process.memory_info().rss) for role, process in processes.items()}
    mixed(daemon, count)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 10)
    wait_for("no request is open", lambda: daemon.in_flight() == 0, 10)
    wait_for("the detokenizer has forgotten all", lambda: daemon.metric("llmd_detokenizer_states") == 0, 10)
    wait_for("a flush succeeds", lambda: daemon.admin("POST", "/v1/flush").status_code == 200, 10)
    kv = wait_for("all pages are free", lambda: (k := daemon.status()["kv"])["pages_free"] == k["pages_total"] and k, 5)
    assert kv["pages_active"] == 0
    for role, process in processes.items():
        fds, rss = before[role]
        wait_for(f"{role} has closed all", lambda process=process, fds=fds: process.num_fds() <= fds + 2, 10)  # type: ignore[misc]
        assert process.memory_info().rss - rss < 16 * 2**20, role


def test_mixed_requests_and_disconnects_leave_nothing(daemon: Daemon) -> None:
    nothing_is_left(daemon, 700)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_mixed_requests_and_disconnects_leave_nothing(daemon: Daemon) -> None:
    nothing_is_left(daemon, 10_000)
