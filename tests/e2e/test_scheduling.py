"""Queues, limits, aborts and the prefix cache through the whole daemon."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW, Brake, Daemon, wait_for

#: Minutes, with the brake on.
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


def config(*, scheduler: dict[str, Any] | None = None, memory: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"model": {"path": "dummy"}, "scheduler": scheduler or {}, "memory": memory or {}}


def ask(daemon: Daemon, prompt: str, client_id: str = "", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
    return httpx.post(daemon.url + "/v1/completions", json=body, headers={"x-request-id": client_id} if client_id else None, timeout=60 * SLOW)


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status and answer.headers["content-type"] == "application/json", answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def outcome(daemon: Daemon, name: str) -> float:
    return daemon.metric(f'llmd_requests_total{{endpoint="/v1/completions",outcome="{name}"}}')


def busy(daemon: Daemon, pool: ThreadPoolExecutor, client_id: str = "busy") -> Future[httpx.Response]:
    """One request that runs."""
    future = pool.submit(ask, daemon, "busy", client_id, **LONG)
    wait_for("it runs", lambda: daemon.requests()[0] == 1, 5)
    return future


def nothing_left(daemon: Daemon) -> None:
    wait_for("nothing runs or waits", lambda: daemon.requests() == (0, 0), 5)
    wait_for("no page is active", lambda: daemon.status()["kv"]["pages_active"] == 0, 5)
    wait_for("no request is open", lambda: daemon.in_flight() == 0, 5)
    assert daemon.metric("llmd_kv_accounting_errors_total") == 0


def test_a_full_queue_refuses_at_once_and_an_abort_frees_a_queued_request(tmp_path: Path) -> None:
    settings = config(scheduler={"max_queued_requests": 8}, memory={"max_running_requests": 1})
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=settings, failpoints=brake.steps).start() as daemon, ThreadPoolExecutor(60) as pool:
        _queue_is_bounded(daemon, pool, brake)
        brake.put_on()
        _queued_is_aborted(daemon, pool)
        _running_is_aborted(daemon)
        nothing_left(daemon)


def _queue_is_bounded(daemon: Daemon, pool: ThreadPoolExecutor, brake: Brake) -> None:
    def one(number: int) -> httpx.Response:
        return ask(daemon, f"number {number}", ignore_eos=True, stream=number % 2 == 0)

    running = busy(daemon, pool)
    futures = [pool.submit(one, number) for number in range(49)]
    wait_for("what cannot wait is refused", lambda: sum(future.done() for future in futures) == 41, 20)
    wait_for("status, which follows the heartbeats, says so", lambda: daemon.requests() == (1, 8), 5)
    taken = []
    with httpx.Client(timeout=60 * SLOW) as client:
        client.get(daemon.url + "/livez")
        for _ in range(5):
            began = time.monotonic()
            assert client.post(daemon.url + "/v1/completions", json={"prompt": "one more", "stream": True}).status_code == 429
            taken.append(time.monotonic() - began)
    assert min(taken) < 0.2 * SLOW
    assert daemon.admin("POST", "/v1/abort", {"client_id": "busy"}).status_code == 200
    brake.release()
    assert running.result(60 * SLOW).status_code == 409
    answers = [future.result(60 * SLOW) for future in futures]
    assert Counter(answer.status_code for answer in answers) == {200: 8, 429: 41}
    for answer in answers:
        if answer.status_code == 429:
            assert error(answer, 429)["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
    wait_for("all are counted", lambda: outcome(daemon, "rejected") == 46, 5)


def _queued_is_aborted(daemon: Daemon, pool: ThreadPoolExecutor) -> None:
    running = busy(daemon, pool)
    queued = pool.submit(ask, daemon, "first", "x")
    wait_for("it waits", lambda: daemon.requests()[1] == 1, 5)
    for body, param in (({}, "rid"), ({"rid": ""}, "rid"), ({"client_id": ""}, "client_id"), ({"rid": "a", "all": True}, "rid")):
        assert error_of(daemon, body, 400)["param"] == param
    assert error_of(daemon, {"client_id": "busyx"}, 404)["code"] == "not_found"
    assert error_of(daemon, {"rid": "x"}, 404)["code"] == "not_found", "a client's id is not ours"
    assert daemon.requests() == (1, 1)
    done = daemon.admin("POST", "/v1/abort", {"client_id": "x"})
    assert done.status_code == 200 and len(done.json()["data"]["aborted"]) == 1
    assert error(queued.result(60 * SLOW), 409)["code"] == "aborted"
    assert not running.done(), "it was not waited for"
    again = pool.submit(ask, daemon, "second", "x")
    assert daemon.admin("POST", "/v1/abort", {"client_id": "busy"}).status_code == 200
    assert error(running.result(60 * SLOW), 409)["code"] == "aborted"
    assert again.result(60 * SLOW).json()["choices"][0]["text"] == "secondse"


def error_of(daemon: Daemon, body: dict[str, Any], status: int) -> dict[str, Any]:
    answer = daemon.admin("POST", "/v1/abort", body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def _running_is_aborted(daemon: Daemon) -> None:
    """By llmd's own id; the stream ends with the error, then [DONE], without a finish_reason."""
    events = []
    for event in daemon.stream("abcd", **LONG):
        events.append(event)
        if len(events) == 3:
            assert daemon.admin("POST", "/v1/abort", {"rid": event["id"]}).json()["data"]["aborted"] == [event["id"]]
    assert events[-1]["error"]["code"] == "aborted"
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    assert daemon.admin("POST", "/v1/abort", {"all": True}).json()["data"]["aborted"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_runs_too_long_is_ended(tmp_path: Path, stream: bool) -> None:
    settings = config(scheduler={"request_timeout": "1s"})
    with Daemon(tmp_path, config=settings, failpoints=Brake(tmp_path).steps).start() as daemon:
        began = time.monotonic()
        if stream:
            *_, last = daemon.stream("endless", **LONG)
            assert last["error"]["code"] == "request_timeout"
        else:
            assert error(ask(daemon, "endless", **LONG), 504)["code"] == "request_timeout"
        assert 0.9 < time.monotonic() - began < 10 * SLOW
        wait_for("it is counted", lambda: outcome(daemon, "request_timeout") == 1, 5)
        nothing_left(daemon)


def test_shared_beginnings_are_reported_flushed_and_counted(tmp_path: Path) -> None:
    brake = Brake(tmp_path, on=False)
    with Daemon(tmp_path, config=config(), failpoints=brake.steps).start() as daemon, ThreadPoolExecutor(4) as pool:

        def cached(prompt: str, **fields: Any) -> int:
            usage = ask(daemon, prompt, **fields).json()["usage"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        prompt = "The same words at the start of each prompt. " * 3  # 132 bytes, a token each
        assert [cached(prompt), cached(prompt), cached(prompt + "more")] == [0, 128, 128]
        assert cached("Another prompt, for several choices, that nobody has sent before.", n=4) == 0
        hit = wait_for("the counters have come", lambda: (n := daemon.metric("llmd_prefix_cache_hit_tokens_total")) >= 256 and n, 3)
        assert hit < daemon.metric("llmd_prefix_cache_queried_tokens_total")
        brake.put_on()
        running = busy(daemon, pool)
        assert daemon.admin("POST", "/v1/flush").json()["error"]["code"] == "busy"
        assert daemon.admin("POST", "/v1/flush?timeout_s=0.3").json()["error"]["code"] == "timeout"
        waiting = pool.submit(daemon.admin, "POST", "/v1/flush?timeout_s=300", timeout=300)
        wait_for("the flush waits", lambda: (daemon.status()["operation"] or {}).get("verb") == "flush", 5)
        assert daemon.admin("POST", "/v1/flush?timeout_s=300").json()["error"]["code"] == "flush_in_progress"
        assert cached(prompt) == 128, "requests go on being admitted"
        assert daemon.admin("POST", "/v1/abort", {"all": True}).status_code == 200, "an abort is not kept back by a flush that waits"
        assert running.result(60 * SLOW).status_code == 409
        assert waiting.result(60 * SLOW).json()["state"] == "succeeded"
        wait_for("all pages are free", lambda: (kv := daemon.status()["kv"])["pages_free"] == kv["pages_total"], 5)
        assert cached(prompt) == 0


def test_an_urgent_request_does_not_wait_for_others(tmp_path: Path) -> None:
    settings = config(scheduler={"policy": "priority"}, memory={"max_running_requests": 2})
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=settings, failpoints=brake.steps).start() as daemon, ThreadPoolExecutor(8) as pool:
        low = [pool.submit(ask, daemon, f"low {i} ", priority=10, max_tokens=400, ignore_eos=True) for i in range(6)]
        wait_for("they wait", lambda: daemon.requests() == (2, 4), 5)
        urgent = ask(daemon, "urgent ", priority=0, max_tokens=16)
        assert urgent.json()["choices"][0]["text"] == "urgent urgent ur"
        assert not any(future.done() for future in low)
        brake.release()
        for i, future in enumerate(low):
            assert future.result(60 * SLOW).json()["choices"][0]["text"] == (f"low {i} " * 67)[:400]
        wait_for("it is counted", lambda: daemon.metric("llmd_requests_preempted_total") == 1, 5)
        assert error(ask(daemon, "x", priority="high"), 400)["param"] == "priority"
        nothing_left(daemon)


def test_a_storm_of_clients_that_leave_and_aborts_harms_nobody(tmp_path: Path) -> None:
    _storm(tmp_path, seconds=4.0, clients=25)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_long_storm(tmp_path: Path) -> None:
    _storm(tmp_path, seconds=60.0, clients=100)


def _storm(tmp_path: Path, *, seconds: float, clients: int) -> None:
    with Daemon(tmp_path, config=config(memory={"max_total_tokens": 8192}), failpoints="scheduler.step=delay(1ms)").start() as daemon:
        pids = {role: daemon.pid(role) for role in ("scheduler", "detokenizer", "frontend", "control")}
        before = daemon.metric("llmd_requests_total")
        sent, answered = asyncio.run(_clients(daemon, time.monotonic() + seconds, clients))
        daemon.admin("POST", "/v1/abort", {"all": True})
        wait_for("no request is open", lambda: daemon.in_flight() == 0, 10)
        # The exposition may be a heartbeat old. A client may leave before its request is read: then the server has never seen it.
        wait_for("every answered request is counted", lambda: daemon.metric("llmd_requests_total") - before >= answered, 10)
        assert daemon.metric("llmd_requests_total") - before <= sent
        assert {role: daemon.pid(role) for role in pids} == pids
        assert "Traceback" not in daemon.log_text()
        nothing_left(daemon)
        assert daemon.text("still there", max_tokens=11) == "still there"


async def _clients(daemon: Daemon, end: float, count: int) -> tuple[int, int]:
    """Returns how many requests were sent, and how many of them were answered at least in part."""
    sent = answered = 0

    async def one(number: int, http: httpx.AsyncClient) -> None:
        nonlocal sent, answered
        dice = random.Random(number)
        while time.monotonic() < end:
            sent += 1
            body = {"prompt": "shared beginning of all " * dice.randrange(1, 5) + str(dice.random()), "max_tokens": 500, "ignore_eos": True, "stream": True}
            try:
                async with asyncio.timeout(dice.random() * 0.3 + 0.02), http.stream("POST", daemon.url + "/v1/completions", json=body) as answer:
                    answered += 1
                    async for _ in answer.aiter_bytes():
                        pass
            except (TimeoutError, httpx.HTTPError):
                pass

    def aborts() -> None:
        while time.monotonic() < end:
            daemon.admin("POST", "/v1/abort", {"all": True})
            time.sleep(random.random())

    thread = threading.Thread(target=aborts)
    thread.start()
    async with httpx.AsyncClient(timeout=60 * SLOW, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(one(number, http) for number in range(count)))
    thread.join()
    return sent, answered
