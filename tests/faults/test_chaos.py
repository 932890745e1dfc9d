"""Chaos: processes are killed and stopped at random under load, and no client notices more than a pause.

What each request has to say is asked of the undisturbed daemon first: greedy and seeded, streamed and whole, several choices, stop strings,
logprobs. Then every answer has to be that, character by character, whatever dies meanwhile. Now and then one of the two frontends
dies: only whoever was connected to that one may see an error, a broken connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.daemon import SLOW, Daemon, has_status, wait_for
from tests.models import random_llama

CLIENTS = 32
CONFIG = {
    "supervision": {
        "hang_timeout": "3s",
        "helper_timeout": f"{2 * SLOW:g}s",
        "control_timeout": f"{2 * SLOW:g}s",
        "restart": {"max": 1000, "backoff": ["0s", "0s", "0s"]},
    },
    "memory": {"max_running_requests": 40},
    "http": {"port": 0, "workers": 2},
}
ROLES = ("scheduler", "detokenizer", "control")
FRONTENDS = ("frontend-0", "frontend-1")
#: One fault of a frontend for so many others.
FRONTEND_EVERY = 4
#: Seconds between two tokens of whomever, when nothing is wrong.
USUAL_GAP = 0.5
#: A request may take so long, pauses included; beyond, it hangs.
PATIENCE = 120 * SLOW
#: Faults after which chaos may end in its time; on a slow machine, where processes are away for longer, it goes on until there were so many.
ENOUGH = 6


@dataclass
class Fault:
    """One process killed or stopped, and the longest time in which no token came afterwards to anybody whom it does not cut off."""

    role: str
    signum: signal.Signals
    at: float
    pause: float = 0.0
    ports: frozenset[int] = frozenset()
    """Of a frontend: the clients' ports of the connections that it had."""


@dataclass
class Observed:
    """What the clients saw."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Connections that ended before their answer: the client's port, and how."""
    tokens_at: list[tuple[float, int]] = field(default_factory=list)
    """When a token came, and at which port of its client."""


def requests_of(model_says: Any) -> list[dict[str, Any]]:
    """Bodies of requests; `model_says(body)` gives texts, from which stop strings are taken."""
    base = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
    bodies = [{**base, "prompt": f"{n}: The answer to the question {n * 7919} is"} for n in range(4)]
    bodies += [{**base, "prompt": f"seeded {n}", "temperature": 0.9, "seed": n, "top_p": 0.95, "max_tokens": 90} for n in range(3)]
    bodies += [{**base, "prompt": "two of them", "temperature": 1.0, "seed": 77, "n": 2}]
    bodies += [{**base, "prompt": "repeats itself", "frequency_penalty": 0.5, "presence_penalty": 0.3}]
    bodies += [{**base, "prompt": "with numbers", "logprobs": 2, "max_tokens": 60}]
    bodies += [{**base, "prompt": "and an echo", "logprobs": 0, "echo": True, "max_tokens": 60}]
    for prompt in ("stops here", "stops there"):
        body = {**base, "prompt": prompt}
        text = model_says(body)[0]
        bodies.append({**body, "stop": [text[len(text) // 2 : len(text) // 2 + 3]]})
    return bodies


def read_whole(answer: dict[str, Any]) -> list[Any]:
    return [(c["text"], c["finish_reason"], tokens_of(c["logprobs"])) for c in answer["choices"]]


def tokens_of(logprobs: dict[str, Any] | None) -> tuple[list[str], list[float | None]] | None:
    """Tokens and their numbers; where in the text a token stands is left out, for it follows."""
    return None if logprobs is None else (logprobs["tokens"], [None if v is None else round(v, 4) for v in logprobs["token_logprobs"]])


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stream: bool, on_token: Callable[[], object] = lambda: None) -> list[Any]:
    """The choices of one request, or an AssertionError. `on_token` is called as they come in a stream."""
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return read_whole(answer.json())
    choices: dict[int, Any] = {n: ["", None, None] for n in range(body.get("n", 1))}
    done = False
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                on_token()
                for choice in event["choices"]:
                    mine = choices[choice["index"]]
                    mine[0] += choice["text"]
                    mine[1] = choice["finish_reason"] or mine[1]
                    if choice["logprobs"] is not None:
                        names, values = tokens_of(choice["logprobs"]) or ([], [])
                        mine[2] = (mine[2][0] + names, mine[2][1] + values) if mine[2] else (names, values)
    assert done, "a stream ended without [DONE]"
    return [tuple(choice) for choice in choices.values()]


class Ports(httpx.AsyncHTTPTransport):
    """Knows the local port of the connection that the latest request went over."""

    port = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def trace(name: str, info: dict[str, Any]) -> None:
            stream = info.get("return_value")
            if name == "connection.connect_tcp.complete" and stream is not None:
                self.port = stream.get_extra_info("client_addr")[1]

        request.extensions["trace"] = trace
        return await super().handle_async_request(request)


async def client_loop(number: int, daemon: Daemon, bodies: list[dict[str, Any]], oracle: list[list[Any]], over: Callable[[], bool], seen: Observed) -> None:
    dice = random.Random(number)
    ports = Ports()
    async with httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE, transport=ports) as client:
        while not over():
            choice, stream = dice.randrange(len(bodies)), dice.random() < 0.6
            # A new connection now and then, so that all do not stay for ever with the frontend that has not died.
            client.headers["connection"] = "close" if dice.random() < 0.3 else "keep-alive"
            what = f"request {choice} ({'streamed' if stream else 'whole'})"
            try:
                answer = await ask(client, bodies[choice], stream, lambda: seen.tokens_at.append((time.monotonic(), ports.port)))
            except httpx.TransportError as error:
                seen.broken.append((ports.port, f"{what}: {type(error).__name__}: {error}"))
                continue
            except (httpx.HTTPError, AssertionError) as error:
                seen.wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            seen.answers += 1
            if answer != oracle[choice]:
                seen.wrong.append(f"{what}: {answer!r} is not {oracle[choice]!r}")


async def inject(daemon: Daemon, over: Callable[[float], bool], every: tuple[float, float], dice: random.Random, faults: list[Fault]) -> None:
    kinds = [(role, signum) for role in ROLES for signum in (signal.SIGKILL, signal.SIGSTOP)]
    queue: list[tuple[str, signal.Signals]] = []
    while not over(every[1]):
        await asyncio.sleep(dice.uniform(*every))
        queue = queue or dice.sample(kinds, len(kinds))
        role, signum = queue.pop()
        if len(faults) % FRONTEND_EVERY == FRONTEND_EVERY - 1:
            role = dice.choice(FRONTENDS)
        fault = await asyncio.to_thread(strike, daemon, role, signum)
        faults += [fault] if fault is not None else []


def strike(daemon: Daemon, role: str, signum: signal.Signals) -> Fault | None:
    """Kill or stop a process; None: it is being replaced."""
    name, _, rank = role.partition("-")
    child = daemon.child(name, int(rank or 0))
    if child is None:
        return None
    ports: frozenset[int] = frozenset()
    try:
        if name == "frontend":
            os.kill(child.pid, signal.SIGSTOP)  # so that it takes no connection while its connections are looked at
            wait_for("it stands still, or is gone", lambda: has_status(child) in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED), 20, 0.001)
            ports = frozenset(c.raddr.port for c in child.net_connections("tcp") if c.raddr)
        os.kill(child.pid, signum)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None  # of an earlier fault
    return Fault(role, signum, time.monotonic(), ports=ports)


async def run(daemon: Daemon, seconds: float, every: tuple[float, float], seed: int) -> tuple[Observed, list[Fault]]:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE) as client:
        texts: dict[str, list[str]] = {}
        for prompt in ("stops here", "stops there"):
            body = {"max_tokens": 120, "ignore_eos": True, "temperature": 0, "prompt": prompt}
            texts[prompt] = [choice[0] for choice in await ask(client, body, False)]
        bodies = requests_of(lambda body: texts[body["prompt"]])
        oracle = [await ask(client, body, False) for body in bodies]
        assert oracle == [await ask(client, body, True) for body in bodies], "streamed and whole are the same"
    seen, faults, began = Observed(), list[Fault](), time.monotonic()

    def over(ahead: float = 0.0) -> bool:
        lasted = time.monotonic() + ahead - began
        return lasted >= seconds * SLOW or (lasted >= seconds and len(faults) >= ENOUGH)

    clients = [client_loop(n, daemon, bodies, oracle, over, seen) for n in range(CLIENTS)]
    await asyncio.gather(inject(daemon, over, every, random.Random(seed), faults), *clients)
    return seen, faults


def measure_pauses(seen: Observed, faults: list[Fault]) -> None:
    """The longest silence that a fault began, however many more came before it was over; of a frontend's death, as the clients of the other one hear it."""
    ends = [fault.at for fault in faults[1:]] + [float("inf")]
    for fault, end in zip(faults, ends, strict=True):
        heard = [at for at, port in seen.tokens_at if port not in fault.ports]
        for earlier, later in pairwise(heard):
            if fault.at - USUAL_GAP <= earlier < end - USUAL_GAP and later > fault.at:
                fault.pause = max(fault.pause, later - max(earlier, fault.at))


def print_table(seen: Observed, faults: list[Fault], recovered: float) -> None:
    kinds = Counter((fault.role, fault.signum.name) for fault in faults)
    lost = len(seen.wrong) + len(unexplained(seen, faults))
    asked = seen.answers + len(seen.wrong) + len(seen.broken)
    print(f"\nrequests {asked}, recovered {recovered:.0f}, broken with their frontend {len(seen.broken)}, lost or wrong {lost}")
    for (role, name), count in sorted(kinds.items()):
        pauses = sorted(fault.pause for fault in faults if (fault.role, fault.signum.name) == (role, name))
        print(f"{role:12} {name:8} x{count:<3} pause p50 {statistics.median(pauses):6.2f} s  max {pauses[-1]:6.2f} s")


def lasting(daemon: Daemon) -> dict[str, psutil.Process]:
    """The processes in which something could pile up."""
    supervisor = psutil.Process(daemon.process.pid if daemon.process else 0)
    return {"supervisor": supervisor} | {name: psutil.Process(daemon.pid("frontend", rank)) for rank, name in enumerate(FRONTENDS)}


def healed(daemon: Daemon) -> bool:
    """No process stands still, and none is on its way."""
    stopped = any(has_status(child) == psutil.STATUS_STOPPED for child in daemon.children())
    return not stopped and all(process["state"] in ("ready", "busy") for process in daemon.status()["processes"])


def descriptors(daemon: Daemon) -> dict[str, int]:
    return {name: process.num_fds() for name, process in lasting(daemon).items()}


def memory(daemon: Daemon) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in lasting(daemon).items()}


def unexplained(seen: Observed, faults: list[Fault]) -> list[str]:
    """Broken connections that were not those of a frontend that died."""
    lost = frozenset().union(*(fault.ports for fault in faults))
    return [what for port, what in seen.broken if port not in lost]


def chaos(directory: Path, model: dict[str, Any], seconds: float, every: tuple[float, float], seed: int) -> None:
    with Daemon(directory, config={**CONFIG, "model": model}).start(timeout=300) as daemon:
        settled = len(daemon.children())
        before = descriptors(daemon)
        rss = memory(daemon)
        seen, faults = asyncio.run(run(daemon, seconds, every, seed))
        measure_pauses(seen, faults)
        wait_for("the last fault is healed", lambda: healed(daemon), 60)
        daemon.wait_ready(60)
        recovered = daemon.metric("llmd_requests_recovered_total")
        print_table(seen, faults, recovered)
        assert not seen.wrong, "\n".join(seen.wrong[:5])
        assert not (odd := unexplained(seen, faults)), "\n".join(odd[:5])
        assert len(faults) >= 3 and recovered > 0, "there was chaos"
        wait_for("all requests are over", lambda: daemon.requests() == (0, 0) and daemon.in_flight() == 0, 60)
        wait_for("no page is active", lambda: daemon.status()["kv"]["pages_active"] == 0, 60)
        assert daemon.metric("llmd_kv_accounting_errors_total") == 0
        wait_for("the processes of the plan, and no other", lambda: len(daemon.children()) == settled, 60)
        wait_for("clients' connections are closed", lambda: all(now <= before[name] + 8 for name, now in descriptors(daemon).items()), 60)
        assert all(now < rss[name] + 64 * 2**20 for name, now in memory(daemon).items())
        daemon.stop_cleanly()


def tiny(directory: Path) -> dict[str, Any]:
    return {"path": str(random_llama(directory / "model")), "dtype": "float32"}


def test_half_a_minute_of_chaos(tmp_path: Path) -> None:
    chaos(tmp_path, tiny(tmp_path), 30, (1.5, 4.0), seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["tiny", "embedded"])
def test_three_minutes_of_chaos(tmp_path: Path, model: str) -> None:
    """`embedded`: the model that llmd brings, as it is served when nothing is configured."""
    chaos(tmp_path, tiny(tmp_path) if model == "tiny" else {}, 180, (5.0, 10.0), seed=int(os.environ.get("LLMD_TEST_SEED", "2")))
