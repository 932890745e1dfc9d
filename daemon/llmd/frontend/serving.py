"""Delivering one Generation to its client, whole or as a stream of events, and ending it when the client is gone or too slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from llmd.frontend.exchange import CLIENT_GONE, TRANSPORT, Exchange, Receive, Scope, Send
from llmd.frontend.openai.answers import DONE, Answer
from llmd.frontend.replies import reply
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.runtime import Runtime
from llmd.frontend.stream import EVENT_HEADERS, SlowClient, Stream
from llmd.frontend.tokenizer_manager import ChoiceSpec, TextSpec


class Call(NamedTuple):
    """One HTTP request as its handler sees it."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: Exchange


async def serve(runtime: Runtime, call: Call, specs: Sequence[ChoiceSpec | TextSpec], answer: Answer) -> None:
    """Generate and answer. Raises RequestError only while no byte has been sent."""
    generation = runtime.manager.submit(call.exchange.rid, specs, streamed=answer.stream, client_id=call.exchange.request_id)
    watcher = asyncio.create_task(_watch(call.receive, generation))
    try:
        answer.begin(generation)
        if answer.stream:
            http, (scope, _, send, exchange) = runtime.boot.args.http, call
            stream = Stream(runtime.streams, scope, send, exchange, generation, answer, ping=http.sse_ping, patience=http.stream_write_timeout)
            await stream.run()
        else:
            await _whole(runtime, call, generation, answer)
    except SlowClient:
        call.exchange.settle("slow_client")
        call.scope[TRANSPORT].transport.abort()
        await asyncio.wait([watcher], timeout=1)
    finally:
        watcher.cancel()
        runtime.manager.release(generation, call.exchange.outcome or "error")
        _account(runtime, call.exchange, generation, answer)
        if runtime.request_log is not None:
            runtime.request_log.write(call.exchange, generation, runtime.manager.tokenizer)


async def serve_ready(call: Call, answer: Answer, deltas: list[Delta]) -> None:
    """Answer without generating anything."""
    call.exchange.settle("length")
    if not answer.stream:
        await reply(call.send, 200, answer.body(deltas))
        return
    await call.send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    await call.send({"type": "http.response.body", "body": b"".join(map(answer.chunk, deltas)) + answer.closing() + DONE, "more_body": False})


async def _whole(runtime: Runtime, call: Call, generation: Generation, answer: Answer) -> None:
    while not await generation.wait(runtime.boot.args.http.sse_ping):
        pass
    if generation.error is not None:
        raise generation.error
    if generation.disconnected:
        call.exchange.settle("client_disconnect")
        call.exchange.status = CLIENT_GONE
        return
    answer.usage.settle(generation)
    body = await runtime.streams.maker.make(generation.weight, lambda: answer.body(generation.take()))
    _settle(call.exchange, generation)
    await reply(call.send, 200, body)


async def _watch(receive: Receive, generation: Generation) -> None:
    """After the body only one message can come: that the client hung up (or the response is over)."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.disconnect()


def _settle(exchange: Exchange, generation: Generation) -> None:
    for choice in generation.choices:
        exchange.settle(choice.outcome)


def _account(runtime: Runtime, exchange: Exchange, generation: Generation, answer: Answer) -> None:
    answer.usage.settle(generation)
    exchange.prompt_tokens, exchange.completion_tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
    if answer.usage.completion_tokens or generation.error is None:
        runtime.meter.inc("llmd_prompt_tokens_total", answer.usage.prompt_tokens)
    runtime.meter.inc("llmd_generation_tokens_total", max(0, answer.usage.completion_tokens - generation.counted))
