"""What requests took they give back: thousands with shared beginnings, aborts and refusals; minutes above capacity. Through the whole daemon."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW, Daemon, wait_for

SHARED = [name * 40 for name in ("first ", "second ", "third ")]
#: Prompt and output together are at most this much in the pool; more is refused at once.
POOL = 8192


def kv(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["kv"]
    return found


def adds_up(daemon: Daemon) -> bool:
    pages = kv(daemon)
    return pages["pages_free"] + pages["pages_active"] + pages["pages_cached"] == pages["pages_total"]


async def completion(http: httpx.AsyncClient, daemon: Daemon, body: dict[str, Any], patience: float | None = None) -> int:
    """The answer's status; 0 for a client that left after `patience` seconds."""
    try:
        async with asyncio.timeout(patience):
            return (await http.post(daemon.url + "/v1/completions", json=body)).status_code
    except TimeoutError:
        return 0


async def _many(daemon: Daemon, count: int) -> Counter[int]:
    """`count` requests, 16 at a time: a tenth leaves early, a tenth is too long for the pool."""
    dice = random.Random(count)
    left = iter(range(count))
    statuses: Counter[int] = Counter()

    async def worker(http: httpx.AsyncClient) -> None:
        for number in left:
            kind = dice.random()
            prompt = dice.choice(SHARED) + "".join(dice.choices("abcdef", k=dice.randrange(1, 80)))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": dice.randrange(1, 60), "temperature": 0}
            if kind < 0.1:
                statuses[await completion(http, daemon, body | {"max_tokens": 2000, "ignore_eos": True}, patience=0.02 + dice.random() * 0.1)] += 1
            elif kind < 0.2:
                statuses[await completion(http, daemon, body | {"prompt": "x" * (POOL + 100)})] += 1
            else:
                statuses[await completion(http, daemon, body)] += 1
            if number % 50 == 0:
                assert await asyncio.to_thread(adds_up, daemon)

    async with httpx.AsyncClient(timeout=60 * SLOW, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(worker(http) for _ in range(16)))
    return statuses


def _give_back(directory: Path, count: int) -> None:
    config = {"model": {"path": "dummy"}, "memory": {"max_total_tokens": POOL}}
    with Daemon(directory, config=config, failpoints="scheduler.step=delay(1ms)").start() as daemon:
        statuses = asyncio.run(_many(daemon, count))
        assert set(statuses) <= {0, 200, 400} and statuses.total() == count
        assert min(statuses[0], statuses[400]) > count * 0.05 and statuses[200] > count * 0.7
        idle(daemon)
        assert 0 < kv(daemon)["pages_cached"] == kv(daemon)["pages_total"] - kv(daemon)["pages_free"]
        assert daemon.admin("POST", "/v1/flush", {}).status_code == 200
        wait_for("everything is free", lambda: kv(daemon)["pages_free"] == kv(daemon)["pages_total"], 5)


def idle(daemon: Daemon) -> None:
    wait_for("nothing runs or waits", lambda: daemon.requests() == (0, 0), 20)
    wait_for("no page is active", lambda: kv(daemon)["pages_active"] == 0, 5)
    assert adds_up(daemon) and daemon.metric("llmd_kv_accounting_errors_total") == 0


def test_hundreds_of_requests_give_everything_back(tmp_path: Path) -> None:
    _give_back(tmp_path, 400)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_thousands_of_requests_give_everything_back(tmp_path: Path) -> None:
    _give_back(tmp_path, 3000)


async def _pressure(daemon: Daemon, seconds: float) -> Counter[int]:
    """More clients than fit: plain, urgent and patient ones, some that leave, some that ask for too much, some to embed."""
    end = time.monotonic() + seconds
    statuses: Counter[int] = Counter()

    async def client(number: int, http: httpx.AsyncClient) -> None:
        dice = random.Random(number)
        while time.monotonic() < end:
            body: dict[str, Any] = {
                "prompt": dice.choice(SHARED) + str(dice.random()),
                "max_tokens": dice.randrange(20, 400),
                "priority": dice.randrange(-1, 2),
            }
            kind = dice.random()
            if kind < 0.1:
                statuses[await completion(http, daemon, body | {"max_tokens": 2000}, patience=dice.random())] += 1
            elif kind < 0.2:
                statuses[await completion(http, daemon, body | {"prompt": "x" * (POOL + 100)})] += 1
            elif kind < 0.3:
                statuses[(await http.post(daemon.url + "/v1/embeddings", json={"input": body["prompt"]})).status_code] += 1
            else:
                statuses[await completion(http, daemon, body)] += 1

    async with httpx.AsyncClient(timeout=120 * SLOW, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(number, http) for number in range(36)))
    return statuses


def _admit_for_ever(directory: Path, seconds: float) -> None:
    config = {
        "model": {"path": "dummy"},
        "memory": {"max_total_tokens": POOL, "max_running_requests": 24},
        "scheduler": {"policy": "priority", "max_queued_requests": 16},
    }
    with Daemon(directory, config=config, failpoints="scheduler.step=delay(2ms)").start() as daemon:
        statuses = asyncio.run(_pressure(daemon, seconds))
        assert set(statuses) <= {0, 200, 400, 429, 503} and statuses[200] > seconds, statuses
        idle(daemon)
        began = time.monotonic()
        assert daemon.text("one more", max_tokens=8) == "one more"
        assert time.monotonic() - began < 10 * SLOW
        assert "the engine is stalled" not in daemon.log_text(), "the alarm for a queue that stands still"


def test_load_above_capacity_leaves_a_daemon_that_admits(tmp_path: Path) -> None:
    _admit_for_ever(tmp_path, 6)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_above_capacity_leave_a_daemon_that_admits(tmp_path: Path) -> None:
    _admit_for_ever(tmp_path, 600)
