"""`Endpoint`: the course of one generating request, from its body to its last byte, for both endpoints."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from llmd.frontend.body import read_json
from llmd.frontend.exchange import Exchange, Receive, Scope, Send, exchange_of
from llmd.frontend.holding import admit
from llmd.frontend.openai.answers import Answer
from llmd.frontend.req_state import Delta
from llmd.frontend.runtime import Runtime
from llmd.frontend.serving import Call, serve, serve_ready
from llmd.frontend.tokenizer_manager import ChoiceSpec, TextSpec


class Prepared(Struct, frozen=True):
    """A checked request: what to generate and how to answer; or what is already known, when there is nothing to generate."""

    specs: Sequence[ChoiceSpec | TextSpec]
    answer: Answer
    ready: list[Delta] | None = None
    names: tuple[str, ...] = ()
    """Those that the client gives its choices."""


class Endpoint:
    """An ASGI application for one route. Subclasses check a request and turn it into choices."""

    path: str
    rid_prefix: str

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.boot = runtime.boot
        self.view = runtime.view
        self.manager = runtime.manager

    async def prepare(self, exchange: Exchange, data: dict[str, Any]) -> Prepared:
        """Check the body. Raises RequestError."""
        raise NotImplementedError

    def rid(self, exchange: Exchange) -> str:
        """A new rid, noted for the log and the headers."""
        exchange.rid = self.rid_prefix + uuid.uuid4().hex
        return exchange.rid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        async with contextlib.AsyncExitStack() as stack:
            # From its headers on a request is in flight, and a drain that begins while its body arrives waits for it;
            # of one that comes during a drain the body is read only so that the client gets the answer.
            admitted = not self.view.draining
            if admitted:
                stack.enter_context(self.manager.request())
            data = await self._read(scope, receive)
            await admit(self.view, self.runtime.meter, receive, admitted=admitted)
            if not admitted:
                stack.enter_context(self.manager.request())
            prepared = await self.prepare(exchange, data)
            if prepared.names:
                await stack.enter_async_context(self.manager.names.held(prepared.names))
            call = Call(scope, receive, send, exchange)
            if prepared.ready is not None:
                await serve_ready(call, prepared.answer, prepared.ready)
                return
            await serve(self.runtime, call, prepared.specs, prepared.answer)

    async def _read(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        async with self.view.arriving():
            return await read_json(scope, receive, limit=self.boot.args.http.max_body, executor=self.manager.executor)
