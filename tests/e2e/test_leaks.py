"""Thousands of requests of every kind, one in five of whose clients goes away: afterwards nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import SLOW, Daemon, wait_for

AT_ONCE = 24
#: Sockets and timers that a process may have more of after its first thousand requests than when it was fresh.
FEW = 8
MIB = 2**20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    config = {
        "model": {"path": "dummy", "context_length": 512},
        "memory": {"max_running_requests": 16, "max_total_tokens": 4096},
        "http": {"access_log_exclude": ["/"]},
    }
    with Daemon(tmp_path, config=config, failpoints="").start() as started:
        yield started


def requests(count: int, seed: int) -> list[tuple[str, dict[str, Any], bool]]:
    """(path, body, whether the client goes away before it has the answer)."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        text, tokens, stream = "some words to go on with " * dice.randrange(1, 6), dice.randrange(1, 60), dice.random() < 0.5
        path, body = dice.choice(
            [
                ("/v1/completions", {"prompt": text, "max_tokens": tokens, "stream": stream, "n": dice.choice([1, 1, 3])}),
                ("/v1/completions", {"prompt": [text, "b"], "max_tokens": tokens, "logprobs": 2, "echo": True, "stream": stream}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream, "stop": ["words"]}),
                ("/generate", {"text": text, "sampling_params": {"max_new_tokens": tokens}, "stream": stream, "rid": f"r{seed}-{number}"}),
                ("/generate", {"text": [text, text], "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True, "logprob_start_len": 0}),
                ("/v1/embeddings", {"input": [text, "b"], "encoding_format": dice.choice(["float", "base64"])}),
                ("/v1/tokenize", {"prompt": text}),
                ("/v1/completions", {"prompt": text, "max_tokens": -1}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * 40}]}),
                ("/no/such/path", {}),
            ]
        )
        made.append((path, body, dice.random() < 0.2))
    return made


async def ask(port: int, path: str, body: dict[str, Any], goes: bool, dice: random.Random) -> int:
    """The status of one request on a connection of its own; 0 where the client has gone."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if goes and dice.random() < 0.2:
            writer.write(head + data[: len(data) // 2])
            await writer.drain()
            return 0
        writer.write(head + data)
        await writer.drain()
        if goes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(dice.choice([1, 400, 2000])), dice.random() * 0.02)
            return 0
        answer = await asyncio.wait_for(reader.read(-1), 60 * SLOW)
        return int(answer.split(b" ", 2)[1])
    finally:
        if goes and dice.random() < 0.5:
            writer.transport.abort()  # type: ignore[attr-defined]
        else:
            writer.close()


async def load(port: int, asked: list[tuple[str, dict[str, Any], bool]], seed: int) -> Counter[int]:
    """All of them, AT_ONCE at a time."""
    waiting, dice, statuses = iter(asked), random.Random(seed), Counter[int]()

    async def client() -> None:
        for path, body, goes in waiting:
            statuses[await ask(port, path, body, goes, dice)] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


def sizes(daemon: Daemon) -> dict[str, tuple[int, int, int]]:
    """Each process by its place in the command line: (descriptors, threads, resident bytes)."""
    found = {}
    for role in ("frontend", "detokenizer", "scheduler", "control"):
        process = psutil.Process(daemon.pid(role))
        found[role] = process.num_fds(), process.num_threads(), process.memory_info().rss
    return found


def check(daemon: Daemon, first: int, count: int, growth: int) -> None:
    """`first` requests make it warm; the next `count` must leave no trace."""
    asyncio.run(load(daemon.port, requests(first, 1), 1))
    settle(daemon)
    before, pids = sizes(daemon), {child.pid for child in daemon.children()}
    asked = requests(count, 2)
    statuses = asyncio.run(load(daemon.port, asked, 2))
    assert sum(statuses.values()) == count
    assert set(statuses) <= {0, 200, 400, 404}, statuses
    assert statuses[0] == sum(goes for _, _, goes in asked)
    settle(daemon)
    assert {child.pid for child in daemon.children()} == pids
    wait_for("descriptors and threads are those of before", lambda: same(before, sizes(daemon)), 30)
    for role, (_, _, rss) in sizes(daemon).items():
        assert rss - before[role][2] < growth, f"{role} has grown by {(rss - before[role][2]) / MIB:.0f} MiB"
    assert daemon.text("abc", max_tokens=3) == "abc"
    assert daemon.stop() == 0


def settle(daemon: Daemon) -> None:
    """Nothing runs, waits or is in flight, and every page can be had."""
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 60)
    wait_for("nothing is in flight", lambda: daemon.in_flight() == 0, 60)
    wait_for("a flush is taken", lambda: daemon.admin("POST", "/v1/flush", {}).status_code == 200, 60)

    def free() -> bool:
        kv = daemon.status()["kv"]
        return bool(kv["pages_free"] == kv["pages_total"])

    wait_for("every page is free", free, 60)
    assert daemon.metric("llmd_kv_accounting_errors_total") == 0


def same(before: dict[str, tuple[int, int, int]], now: dict[str, tuple[int, int, int]]) -> bool:
    return all(now[role][0] <= fds + FEW and now[role][1] <= threads + FEW for role, (fds, threads, _) in before.items())


def test_a_thousand_requests_leave_nothing_behind(daemon: Daemon) -> None:
    check(daemon, 200, 1000, 40 * MIB)


@pytest.mark.soak
def test_ten_thousand_requests_leave_nothing_behind(daemon: Daemon) -> None:
    check(daemon, 1000, 10_000, 40 * MIB)
