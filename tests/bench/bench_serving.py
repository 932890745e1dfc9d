"""The whole daemon on a model, over HTTP: seconds to ready, memory of each process, output tokens a second.

`python -m tests.bench.bench_serving [MODEL]`; MODEL as in `model.path`, the embedded one by default. Each stream has its own
prompt of about 128 tokens and generates 128; the median of three rounds is printed.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.daemon import Daemon

STREAMS = (1, 4, 16)
NEW_TOKENS = 128
ROUNDS = 3
WORDS = ("river", "stone", "lamp", "garden", "engine", "letter", "winter", "bridge", "paper", "window", "salt", "copper", "meadow")


def prompt(number: int) -> str:
    """About 128 tokens that no other number shares from the start on."""
    return f"{number} " + " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(120))


def one(url: str, number: int) -> int:
    body = {"prompt": prompt(number), "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=600)
    return int(answer.raise_for_status().json()["usage"]["completion_tokens"])


def rate(url: str, streams: int, offset: int) -> float:
    """Output tokens a second of `streams` requests sent at once."""
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        began = time.perf_counter()
        tokens = sum(pool.map(lambda n: one(url, offset + n), range(streams)))
        return tokens / (time.perf_counter() - began)


def main(argv: list[str]) -> None:
    config = {"model": {"path": argv[0]}} if argv else {}
    starts = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            began = time.perf_counter()
            with Daemon(Path(directory), config=config).start(timeout=600) as daemon:
                starts.append(time.perf_counter() - began)
                daemon.stop()
    print(f"seconds from `llmd run` to ready: median {statistics.median(starts):.2f} of {[round(s, 2) for s in starts]}")
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), config=config).start(timeout=600) as daemon:
        offset = 0
        for streams in STREAMS:
            rates = []
            for _ in range(ROUNDS):
                rates.append(rate(daemon.url, streams, offset))
                offset += streams
            print(f"{streams:3d} streams: median {statistics.median(rates):6.1f} output tokens/s of {[round(r, 1) for r in rates]}", flush=True)
        for process in daemon.status()["processes"]:
            print(f"{process['role']:<12} {process['rss_bytes'] / 2**20:7.1f} MiB resident")
        daemon.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
