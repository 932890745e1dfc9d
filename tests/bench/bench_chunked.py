"""What a long prompt does to streams that run: `python -m tests.bench.bench_chunked [PROMPT_TOKENS [STREAMS]]`.

Gaps between the events of 8 streams of the embedded model, before and while a prompt of 6,000 tokens comes in; with
`chunked_prefill_size: auto`, and with the prompt in one step.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.daemon import Daemon

BASELINE_S = 15.0


class Stream(threading.Thread):
    """One stream; `times` of its events."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        super().__init__(daemon=True)
        self._daemon, self._prompt = daemon, f"Tell a story about the number {number}."
        self.times: list[float] = []

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
        try:
            with httpx.stream("POST", self._daemon.url + "/v1/completions", json=body, timeout=600) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.monotonic())
        except httpx.HTTPError:
            pass  # the daemon has been stopped

    def gaps(self, begin: float, end: float) -> list[float]:
        times = [t for t in self.times if begin <= t <= end]
        return [b - a for a, b in itertools.pairwise(times)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def measure(chunk: int | str, prompt_tokens: int, streams: int) -> None:
    """Print one line."""
    config: dict[str, Any] = {"scheduler": {"chunked_prefill_size": chunk}, "memory": {"max_total_tokens": 32768}}
    with tempfile.TemporaryDirectory(prefix="llmd-bench-") as directory, Daemon(Path(directory), config=config).start(timeout=300) as daemon:
        running = [Stream(daemon, n) for n in range(streams)]
        for stream in running:
            stream.start()
        while min(len(stream.times) for stream in running) < 5:
            time.sleep(0.1)
        begin = time.monotonic()
        time.sleep(BASELINE_S)
        middle = time.monotonic()
        ids = random.Random(0).choices(range(1000, 40000), k=prompt_tokens)
        answer = httpx.post(daemon.url + "/v1/completions", json={"prompt": ids, "max_tokens": 1, "ignore_eos": True}, timeout=900)
        assert answer.status_code == 200, answer.text
        end = time.monotonic()
        time.sleep(0.5)
        base = [gap for stream in running for gap in stream.gaps(begin, middle)]
        loaded = [gap for stream in running for gap in stream.gaps(middle - percentile(base, 0.5), end + percentile(base, 0.5))]
        print(
            f"chunk {chunk!s:>6}: gap p50 {statistics.median(base) * 1e3:7.1f} ms, p99 {percentile(base, 0.99) * 1e3:7.1f} ms; "
            f"while {prompt_tokens} tokens come in: p50 {percentile(loaded, 0.5) * 1e3:7.1f} ms, p99 {percentile(loaded, 0.99) * 1e3:8.1f} ms, "
            f"max {max(loaded, default=0.0) * 1e3:8.1f} ms (p99 x{percentile(loaded, 0.99) / percentile(base, 0.99):.1f}, "
            f"p99 over median x{percentile(loaded, 0.99) / percentile(base, 0.5):.1f}); prompt took {end - middle:.1f} s",
            flush=True,
        )


def main() -> None:
    prompt_tokens, streams = (int(value) for value in [*sys.argv[1:], *("6000", "8")[len(sys.argv) - 1 :]])
    for chunk in ("auto", 8192):
        measure(chunk, prompt_tokens, streams)


if __name__ == "__main__":
    main()
