"""CPU microseconds of frontend and detokenizer: a streamed token at 1, 64 and 256 streams, a request that brings one token.

`python -m tests.bench.bench_frontend [ROUNDS]`. The whole daemon on the dummy model. Counted is CPU time of the processes, all threads
(/proc/PID/task/*/schedstat), which a busy machine hardly changes, less what they take while idle; the least of ROUNDS (3) is printed. `events` is how many
server-sent events a token came in: below 1 the frontend was behind and merged.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.daemon import Daemon

STREAMS = ((1, 400), (64, 300), (256, 200))
#: Seconds of one step: at full speed the dummy outruns the frontend, which then merges.
STEP = "10ms"
REQUESTS = 1000
CONNECTIONS = 16
IDLE_S = 4.0
ROLES = ("frontend", "detokenizer")


def cpu_us(pid: int) -> float:
    """CPU time of a process since its start, in microseconds."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1000


class Cost(NamedTuple):
    """CPU microseconds for one token or request, and events for one token."""

    frontend: float
    detokenizer: float
    events: float

    @property
    def total(self) -> float:
        return self.frontend + self.detokenizer


def request(path: str, **fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


def stream(port: int, streams: int, tokens: int, path: str, **fields: object) -> bytes:
    """Run streams to their end, read as they come; all bytes of one of them."""
    selector = selectors.DefaultSelector()
    for number in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        prompt = f"stream {number} of words that come again and again"
        ask = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        connection.sendall(request(path, stream=True, max_tokens=tokens, temperature=0, ignore_eos=True, **ask, **fields))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    data = bytearray()
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(1 << 18)
            key.data.extend(piece)
            if not piece or key.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                assert piece, "cut off"
                data = key.data
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return bytes(data)


def requests(port: int, count: int) -> None:
    """Requests of one token, not streamed, over kept connections."""
    selector = selectors.DefaultSelector()
    ask = request("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=1, temperature=0)
    left = count - CONNECTIONS
    for _ in range(CONNECTIONS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(ask)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(1 << 16).endswith(b"}}}"):
                continue
            if left > 0:
                left -= 1
                key.fileobj.sendall(ask)
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()


def idle(pids: list[int]) -> list[float]:
    """CPU microseconds that each process takes in a second of nothing to do."""
    before = [cpu_us(pid) for pid in pids]
    time.sleep(IDLE_S)
    return [(cpu_us(pid) - was) / IDLE_S for pid, was in zip(pids, before, strict=True)]


def cost(daemon: Daemon, rest: list[float], streams: int, tokens: int, path: str = "/v1/chat/completions", **fields: object) -> Cost:
    """Of one streamed token; `streams` 0: of one request. `rest`: what the processes take a second anyway."""
    pids = [daemon.pid(role) for role in ROLES]
    began = time.monotonic()
    before = [cpu_us(pid) for pid in pids]
    if streams:
        data = stream(daemon.port, streams, tokens, path, **fields)
    else:
        requests(daemon.port, tokens)
        data = b""
    count = max(1, streams) * tokens
    passed = time.monotonic() - began
    used = [(cpu_us(pid) - was - passed * base) / count for pid, was, base in zip(pids, before, rest, strict=True)]
    return Cost(used[0], used[1], data.count(b"data: ") / tokens)


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), config=CONFIG, failpoints=f"scheduler.step=delay({STEP})").start() as daemon:
        cost(daemon, [0, 0], 16, 50)
        rest = idle([daemon.pid(role) for role in ROLES])
        print(f"{'':<34} {'frontend':>9} {'detok.':>9} {'both':>9} {'events':>7}")
        for streams, tokens in STREAMS:
            for name, fields in (("", {}), (", logprobs", {"logprobs": True, "top_logprobs": 2})):
                best = min((cost(daemon, rest, streams, tokens, **fields) for _ in range(rounds)), key=lambda c: c.total)
                print(f"{f'token, {streams} streams{name}':<34} {best.frontend:9.1f} {best.detokenizer:9.1f} {best.total:9.1f} {best.events:7.2f}")
        best = min((cost(daemon, rest, 0, REQUESTS) for _ in range(rounds)), key=lambda c: c.total)
        print(f"{'request of one token':<34} {best.frontend:9.1f} {best.detokenizer:9.1f} {best.total:9.1f}")


CONFIG = {"model": {"path": "dummy"}, "memory": {"max_running_requests": 256}}

if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
