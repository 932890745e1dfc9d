"""What the prefix cache saves: `python -m tests.bench.bench_prefix [REQUESTS [PREFIX_TOKENS]]`.

64 requests to the embedded model that share their first 1,000 tokens, 8 at a time, 16 tokens each; with the cache on and off.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.daemon import Daemon

AT_ONCE = 8


def measure(cache: bool, requests: int, prefix_tokens: int) -> float:
    """Seconds for all of them."""
    dice = random.Random(0)
    prefix = dice.choices(range(1000, 40000), k=prefix_tokens)
    prompts = [prefix + dice.choices(range(1000, 40000), k=20) for _ in range(requests)]
    config: dict[str, Any] = {"scheduler": {"radix_cache": cache, "queue_timeout": None}, "memory": {"max_total_tokens": 32768}}
    with tempfile.TemporaryDirectory(prefix="llmd-bench-") as directory, Daemon(Path(directory), config=config).start(timeout=300) as daemon:

        def one(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
            answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=900)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            cached = sum(pool.map(one, prompts))
        seconds = time.monotonic() - began
    total = sum(map(len, prompts))
    print(f"cache {'on' if cache else 'off':<3}: {seconds:6.1f} s, {cached} of {total} prompt tokens cached ({cached / total:.0%})", flush=True)
    return seconds


def main() -> None:
    requests, prefix_tokens = (int(value) for value in [*sys.argv[1:], *("64", "1000")[len(sys.argv) - 1 :]])
    on, off = (measure(cache, requests, prefix_tokens) for cache in (True, False))
    print(f"ratio: {off / on:.1f}")


if __name__ == "__main__":
    main()
