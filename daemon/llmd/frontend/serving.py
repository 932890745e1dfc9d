"""Delivering one Generation to its client, whole or as a stream of events, and ending it when the client is gone or too slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple

from llmd.errors import RequestError
from llmd.frontend.exchange import CLIENT_GONE, TRANSPORT, Exchange, Receive, Scope, Send, outcome_of
from llmd.frontend.openai.answers import DONE, Answer
from llmd.frontend.replies import error_body, internal_error, reply
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.runtime import Runtime
from llmd.frontend.server import HttpProtocol
from llmd.frontend.tokenizer_manager import ChoiceSpec

log = logging.getLogger(__name__)

#: What a proxy sees while a stream has nothing to say.
PING = b": ping\n\n"
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Call(NamedTuple):
    """One HTTP request as its handler sees it."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: Exchange


class SlowClient(Exception):
    """The client has not read for `http.stream_write_timeout`."""


async def serve(runtime: Runtime, call: Call, specs: list[ChoiceSpec], answer: Answer) -> None:
    """Generate and answer. Raises RequestError only while no byte has been sent."""
    generation = runtime.manager.submit(call.exchange.rid, specs, streamed=answer.stream, client_id=call.exchange.request_id)
    watcher = asyncio.create_task(_watch(call.receive, generation))
    try:
        answer.begin(generation)
        if answer.stream:
            await _Stream(runtime, call, generation, answer).run()
        else:
            await _whole(call, generation, answer, runtime.boot.args.http.sse_ping)
    except SlowClient:
        call.exchange.settle("slow_client")
        call.scope[TRANSPORT].transport.abort()
        await asyncio.wait([watcher], timeout=1)
    finally:
        watcher.cancel()
        runtime.manager.release(generation, call.exchange.outcome or "error")
        _account(runtime, call.exchange, generation, answer)


async def serve_ready(call: Call, answer: Answer, deltas: list[Delta]) -> None:
    """Answer without generating anything."""
    call.exchange.settle("length")
    if not answer.stream:
        await reply(call.send, 200, answer.body(deltas))
        return
    await call.send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    await call.send({"type": "http.response.body", "body": b"".join(map(answer.chunk, deltas)) + answer.closing() + DONE, "more_body": False})


async def _whole(call: Call, generation: Generation, answer: Answer, patience: float) -> None:
    while not await generation.wait(patience):
        pass
    if generation.error is not None:
        raise generation.error
    if generation.disconnected:
        call.exchange.settle("client_disconnect")
        call.exchange.status = CLIENT_GONE
        return
    answer.usage.settle(generation)
    body = answer.body(generation.take())
    _settle(call.exchange, generation)
    await reply(call.send, 200, body)


class _Stream:
    """One stream of events. The response starts with the first piece of output, so that a refusal still is a status line."""

    def __init__(self, runtime: Runtime, call: Call, generation: Generation, answer: Answer) -> None:
        http = runtime.boot.args.http
        self._ping, self._patience = http.sse_ping, http.stream_write_timeout
        self._call = call
        self._generation = generation
        self._answer = answer
        self._protocol: HttpProtocol | None = call.scope.get(TRANSPORT)
        self._started = False

    async def run(self) -> None:
        """Until the last byte is sent or the client is gone."""
        try:
            await self._run()
        except (RequestError, SlowClient):
            raise
        except Exception:
            if not self._started:
                raise
            log.exception("a stream failed", extra={"request_id": self._call.exchange.request_id, "rid": self._call.exchange.rid})
            await self._fail(b"", internal_error())

    async def _run(self) -> None:
        generation, answer = self._generation, self._answer
        while True:
            if not await generation.wait(self._ping):
                await self._write(PING)
                continue
            if generation.disconnected:
                self._call.exchange.settle("client_disconnect")
                return
            data = b"".join(map(answer.chunk, generation.take()))
            if generation.error is not None:
                await self._fail(data, generation.error)
                return
            if generation.done:
                break
            if data:
                await self._write(data)
        answer.usage.settle(generation)
        await self._write(data + answer.closing() + DONE, last=True)
        _settle(self._call.exchange, generation)
        if generation.disconnected:
            self._call.exchange.settle("client_disconnect")

    async def _fail(self, data: bytes, error: RequestError) -> None:
        if not self._started and not data:
            raise error
        self._call.exchange.settle(outcome_of(error))
        await self._write(b"%bdata: %b\n\n%b" % (data, error_body(error), DONE), last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await self._call.send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        if self._protocol is not None and self._protocol.flow.write_paused:
            try:
                async with asyncio.timeout(self._patience):
                    await self._protocol.flow.drain()
            except TimeoutError:
                raise SlowClient from None
        await self._call.send({"type": "http.response.body", "body": data, "more_body": not last})


async def _watch(receive: Receive, generation: Generation) -> None:
    """After the body only one message can come: that the client hung up (or the response is over)."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.disconnect()


def _settle(exchange: Exchange, generation: Generation) -> None:
    for choice in generation.choices:
        exchange.settle(choice.finish.reason if choice.finish is not None else "error")


def _account(runtime: Runtime, exchange: Exchange, generation: Generation, answer: Answer) -> None:
    answer.usage.settle(generation)
    exchange.prompt_tokens, exchange.completion_tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
    if answer.usage.completion_tokens or generation.error is None:
        runtime.meter.inc("llmd_prompt_tokens_total", answer.usage.prompt_tokens)
    runtime.meter.inc("llmd_generation_tokens_total", answer.usage.completion_tokens)
