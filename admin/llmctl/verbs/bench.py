"""Measure a server that speaks OpenAI's completions: `llmctl bench [URL]`; without URL, the llmd that llmctl finds.

    llmctl bench                                        # 128 tokens in, 128 out, at 1, 4, 16 and 64 streams
    llmctl bench --work shared --streams 16             # 1,024 shared tokens + 32 in, 64 out
    llmctl bench http://127.0.0.1:8080/v1 --input-len 500 --output-len 50

Prompts are random words, sent greedy with ignore_eos. It loads the server as hard as it can: not for one that others are using.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmctl import exits, load
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.load import WORKS, LoadError, Result, Target, Work


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="the server, as http://HOST:PORT or with its path; default: this llmd")
    parser.add_argument("--model", metavar="NAME", help="model to ask for; default: the first that it serves")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the key; else $OPENAI_API_KEY")
    parser.add_argument(
        "--work", choices=tuple(WORKS), default="short", help="short: 128 in, 128 out; shared: 1,024 shared + 32 in, 64 out; long: 1,500 in, 16 out"
    )
    parser.add_argument("--streams", metavar="N,...", type=_numbers, default=(1, 4, 16, 64), help="requests in flight; default: 1,4,16,64")
    parser.add_argument("--requests", metavar="N", type=_number, help="requests of each run; default: as many as streams")
    parser.add_argument("--input-len", metavar="N", type=_number, help="length of prompts, in words")
    parser.add_argument("--output-len", metavar="N", type=_number, help="tokens to generate")
    parser.add_argument("--seed", type=int, help="of the prompts; default: other prompts each time")


def run(context: Context) -> int:
    rows = _rows(context)
    if context.out.is_table:
        _table(context, rows)
    else:
        context.out.data(rows)
    return exits.FAILED if any(row["errors"] for row in rows) else exits.OK


def _measure(target: Target, work: Work, streams: int, requests: int, seed: int) -> Result:
    """One run. Raises CtlError when the server refuses everything."""
    result = asyncio.run(load.run(target, work, load.prompts(work, requests, seed), streams))
    if len(result.errors) == len(result.samples):
        raise CtlError(exits.FAILED, f"every request failed; the first: {result.errors[0]}")
    return result


def _rows(context: Context) -> list[dict[str, Any]]:
    options = context.options
    target = _target(context)
    work = WORKS[options.work]
    work = replace(work, input_len=options.input_len or work.input_len, output_len=options.output_len or work.output_len)
    work = replace(work, shared_len=min(work.shared_len, work.input_len))
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    rows = []
    for number, streams in enumerate(options.streams):
        context.note(f"{streams} streams …")
        rows.append(_row(_measure(target, work, streams, options.requests or streams, seed + number)))
    return rows


def _table(context: Context, rows: list[dict[str, Any]]) -> None:
    names = ("streams", "requests", "errors", "output_tokens_s", "prompt_tokens_s", "first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms")
    heads = ["STREAMS", "REQUESTS", "ERRORS", "OUT TOK/S", "IN TOK/S", "TTFT P50 MS", "P99", "GAP P50 MS", "P99 "]
    context.out.table(heads, [[row[name] for name in names] for row in rows], frozenset(heads))


def _row(result: Result) -> dict[str, Any]:
    return {
        "streams": result.streams,
        "requests": len(result.samples),
        "errors": len(result.errors),
        "output_tokens_s": round(result.output_tokens_s, 1),
        "prompt_tokens_s": round(result.prompt_tokens_s, 1),
        "first_token_p50_ms": round(result.first(0.5) * 1e3, 1),
        "first_token_p99_ms": round(result.first(0.99) * 1e3, 1),
        "gap_p50_ms": round(result.gap(0.5) * 1e3, 2),
        "gap_p99_ms": round(result.gap(0.99) * 1e3, 2),
        "seconds": round(result.seconds, 3),
    }


def _target(context: Context) -> Target:
    options = context.options
    url = options.url or str(context.get("/v1/status").get("http") or "")
    if not url:
        raise CtlError(exits.FAILED, "this llmd has no HTTP address", "llmctl bench http://HOST:PORT")
    try:
        key = options.api_key_file.read_text().strip() if options.api_key_file else os.environ.get("OPENAI_API_KEY", "")
    except OSError as error:
        raise CtlError(exits.BAD_INPUT, f"{options.api_key_file}: {error.strerror}") from None
    try:
        target = Target(url, options.model or "", key)
        return target if target.model else replace(target, model=asyncio.run(load.models(target))[0])
    except (LoadError, KeyError, IndexError) as error:
        raise CtlError(exits.FAILED, f"{url} does not say what it serves: {error}", "give --model") from None


def _number(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))
