"""Measure a server that speaks OpenAI's completions: `llmctl bench [URL]`; without URL, the llmd that llmctl finds.

    llmctl bench                                        # 128 tokens in, 128 out, at 1, 4, 16 and 64 streams
    llmctl bench --work shared --streams 16             # 1,024 shared tokens + 32 in, 64 out
    llmctl bench http://127.0.0.1:8080/v1 --input-len 500 --output-len 50

Prompts are random words, sent greedy with ignore_eos. It loads the server as hard as it can: not for one that others are using.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmctl import exits, load
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.load import WORKS, BadAddress, LoadError, Result, Target, Unreachable, Work

#: What to do where a server has keys.
KEY_HINT = "give its key with --api-key-file FILE or in $OPENAI_API_KEY"


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
        refused = result.errors[0].startswith(("HTTP 401", "HTTP 403"))
        raise CtlError(exits.PERMISSION if refused else exits.FAILED, f"every request failed; the first: {result.errors[0]}", KEY_HINT if refused else "")
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
    url = options.server or str(context.get("/v1/status").get("http") or "")
    if not url:
        raise CtlError(exits.FAILED, "this llmd has no HTTP address", "llmctl bench http://HOST:PORT")
    try:
        key = Path(options.api_key_file).read_text().strip() if options.api_key_file else os.environ.get("OPENAI_API_KEY", "")
    except OSError as error:
        raise CtlError(exits.BAD_INPUT, f"{options.api_key_file}: {error.strerror}") from None
    target = Target(url, options.model or "", key)
    _reach(target)
    try:
        return target if target.model else replace(target, model=asyncio.run(load.models(target))[0])
    except (LoadError, KeyError, IndexError) as error:
        if isinstance(error, LoadError) and error.status in (401, 403):
            raise CtlError(exits.PERMISSION, f"{url} wants {'another' if key else 'a'} key: {error}", KEY_HINT) from None
        raise CtlError(exits.FAILED, f"{url} does not say what it serves: {error}", "give --model") from None


def _reach(target: Target) -> None:
    """Raise CtlError where nobody takes connections: as for llmd itself, 3 where nobody listens, 4 where nobody answers."""
    try:
        asyncio.run(load.reach(target))
    except BadAddress as error:
        raise CtlError(exits.USAGE, str(error), "llmctl bench http://HOST:PORT") from None
    except Unreachable as error:
        raise CtlError(exits.NOT_RUNNING, f"nobody listens on {error}", "is the server running, and is this its address?") from None
    except LoadError as error:
        hint = "name your authority in SSL_CERT_FILE" if "CERTIFICATE" in str(error) else ""
        raise CtlError(exits.PERMISSION if hint else exits.FAILED, str(error), hint) from None
    except TimeoutError:
        raise CtlError(exits.NOT_ANSWERING, f"{target.url} took no connection within {load.CONNECT_WITHIN:g} s") from None
