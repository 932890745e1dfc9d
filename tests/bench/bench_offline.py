"""The same batch through `Engine` and over HTTP: tokens per second of both, and their ratio. Alternating, the best of several rounds.

    python -m tests.bench.bench_offline [--rounds N] [--model PATH] [--prompts N] [--tokens N]

Without --model: the scripted runner, where everything but the forward pass shows, then the embedded model. Over HTTP the batch is one request of
many prompts, as an offline user of the server would send it, and many requests at once for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from llmd import Engine
from tests.daemon import Daemon


def prompts(count: int) -> list[str]:
    return [f"Question {i}: what is the capital of country number {i * 7 % 195}? Answer:" for i in range(count)]


def measure(model: str, count: int, tokens: int, rounds: int) -> None:
    batch = prompts(count)
    failpoints = "" if model == "dummy" else None
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as directory:
        config = {"model": {"path": model}, "scheduler": {"max_queued_requests": 100_000, "queue_timeout": None, "radix_cache": False}}
        with Daemon(Path(directory), config=config, failpoints=failpoints).start(timeout=300) as daemon:
            http = {"HTTP, one request": lambda: one_request(daemon.url, batch, tokens), "HTTP, one each": lambda: one_each(daemon.url, batch, tokens)}
            over_http = dict.fromkeys(http, 0.0)
            engine_best = 0.0
            with Engine(model_path=model, allow_failpoints=model == "dummy", disable_radix_cache=True) as engine:
                for _ in range(rounds):
                    engine_best = max(engine_best, rate(lambda: offline(engine, batch, tokens)))
                    for name, run in http.items():
                        over_http[name] = max(over_http[name], rate(run))
            daemon.stop()
    best = max(over_http.values())
    print(f"{model}: {count} prompts, {tokens} tokens each, best of {rounds}")
    print(f"  {'Engine.generate':<20} {engine_best:10.1f} tokens/s   {engine_best / best:.2f} x the better of HTTP")
    for name, value in over_http.items():
        print(f"  {name:<20} {value:10.1f} tokens/s")


def rate(run: Callable[[], int]) -> float:
    """Generated tokens per second."""
    began = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - began)


def offline(engine: Engine, batch: list[str], tokens: int) -> int:
    results = engine.generate(batch, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})
    return sum(r["meta_info"]["completion_tokens"] for r in results)


def body(prompt: str | list[str], tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def one_request(url: str, batch: list[str], tokens: int) -> int:
    answer = httpx.post(url + "/v1/completions", json=body(batch, tokens), timeout=3600)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def one_each(url: str, batch: list[str], tokens: int) -> int:
    async def run() -> int:
        async with httpx.AsyncClient(timeout=3600, limits=httpx.Limits(max_connections=64)) as client:
            answers = await asyncio.gather(*(client.post(url + "/v1/completions", json=body(p, tokens)) for p in batch))
        return sum(a.raise_for_status().json()["usage"]["completion_tokens"] for a in answers)

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    cases = [(options.model, 32, 32)] if options.model else [("dummy", 256, 64), ("smollm2-135m-instruct", 16, 16)]
    for model, count, tokens in cases:
        measure(model, options.prompts or count, options.tokens or tokens, options.rounds)


if __name__ == "__main__":
    main()
