"""The admin plane's application. Reads come from what control knows, changes are operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from llmd.control import configuration, crashes, exposition, openapi, peer, requests, status
from llmd.control.core import Core
from llmd.control.events import Event
from llmd.control.history import History
from llmd.control.http import add_errors, flag, json_response, read_body, text, while_connected, whole
from llmd.control.operation import Operation
from llmd.control.operations import WAITING_VERBS, Operations
from llmd.control.verbs import VERBS
from llmd.errors import RequestError

#: Characters of a reason, and of an Idempotency-Key, that are kept.
MAX_REASON = 500
MAX_KEY = 128
#: Seconds between two signs of life in a stream of events.
PING = 15.0
MAX_AUDIT = 10_000


def build(core: Core, operations: Operations, history: History) -> FastAPI:
    """The application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_reads(app, core, history)
    _add_records(app, core, operations)
    _add_events(app, core)
    _add_changes(app, core, operations)
    add_errors(app)
    return app


def _add_reads(app: FastAPI, core: Core, history: History) -> None:
    """What is read comes from control's picture, never from a rank."""

    @app.get("/v1/status")
    async def get_status() -> Response:
        return json_response(status.status(core, history.rates))

    @app.get("/v1/processes")
    async def get_processes() -> Response:
        return json_response({"processes": status.processes(core)})

    @app.get("/v1/kv")
    async def get_kv() -> Response:
        return json_response(requests.kv(core))

    @app.get("/v1/requests")
    async def get_requests() -> Response:
        return json_response(requests.requests(core))

    @app.get("/v1/history")
    async def get_history() -> Response:
        return json_response(history.shown(time.monotonic()))

    @app.get("/v1/config")
    async def get_config() -> Response:
        return json_response(configuration.config(core))

    @app.get("/v1/weights")
    async def get_weights() -> Response:
        return json_response(status.weights(core))

    @app.get("/v1/openapi.json")
    async def get_openapi() -> Response:
        return json_response(openapi.document())

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(core.metrics_text, media_type=exposition.CONTENT_TYPE)


def _add_records(app: FastAPI, core: Core, operations: Operations) -> None:
    """What has been done."""

    @app.get("/v1/operations")
    async def get_operations() -> Response:
        return json_response({"operations": operations.newest_first()})

    @app.get("/v1/operations/{number}")
    async def get_operation(number: str) -> Response:
        operation = operations.get(number)
        if operation is None:
            raise RequestError("there is no such operation", code="not_found")
        return json_response(operation)

    @app.get("/v1/audit")
    async def get_audit(request: Request) -> Response:
        count = whole(request.query_params.get("limit", "100"), "limit", MAX_AUDIT)
        lines = await asyncio.get_running_loop().run_in_executor(None, operations.audit.newest, count)
        return json_response({"audit": lines})

    @app.get("/v1/crashes")
    async def get_crashes(request: Request) -> Response:
        count = whole(request.query_params.get("limit", "50"), "limit", MAX_AUDIT)
        directory = Path(core.boot.state_dir) / "crashes"
        return json_response({"crashes": await asyncio.get_running_loop().run_in_executor(None, crashes.newest, directory, count)})


def _add_events(app: FastAPI, core: Core) -> None:
    """Events as they happen (SSE), from `since` on; with `follow=false` those that there are, as JSON."""

    @app.get("/v1/events")
    async def get_events(request: Request) -> Response:
        query = request.query_params
        since = whole(query.get("since") or request.headers.get("last-event-id") or "0", "since", 2**53)
        if not flag(query.get("follow", "true"), "follow"):
            return json_response({"events": core.events.since(since), "last": core.events.last})
        return StreamingResponse(_stream(core, since), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _stream(core: Core, since: int) -> AsyncIterator[bytes]:
    yield b": llmd events\n\n"
    async for events in core.events.follow(since, PING):
        yield b"".join(map(_sse, events)) or b": ping\n\n"


def _sse(event: Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.seq, event.kind.encode(), msgspec.json.encode(event))


def _add_changes(app: FastAPI, core: Core, operations: Operations) -> None:
    """Each change is an operation, whichever path it came by."""

    async def change(request: Request, verb: str, raw: dict[str, Any]) -> Response:
        reason = text(raw.pop("reason", None) or "", "reason")[:MAX_REASON]
        wait = flag(raw.pop("wait", True), "wait")
        if flag(raw.pop("dry_run", False), "dry_run"):
            return json_response({"verb": verb, "params": raw, "dry_run": True, "plan": await operations.plan(verb, raw)})
        key = request.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
            raise RequestError(f"Idempotency-Key: not 1 to {MAX_KEY} printable characters", param="Idempotency-Key")
        begun: asyncio.Future[Operation] = asyncio.get_running_loop().create_future()
        work = asyncio.ensure_future(operations.run(verb, raw, peer.passed_on(request.scope, core.frontend_pids), reason, key, begun))
        if not wait:
            return await _begun(work, begun)
        if verb in WAITING_VERBS:
            await while_connected(request, work)
            operations.end(work, "the caller hung up")
        return json_response(await work)

    async def _begun(work: asyncio.Task[Operation], begun: asyncio.Future[Operation]) -> Response:
        """202 with the record of what goes on; what is over by then is answered as ever."""
        await asyncio.wait([work, begun], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return json_response(await work)
        core.spawn(_outcome(work), "an operation that nobody waits for")
        operation = begun.result()
        return json_response(operation, 202, {"location": f"/v1/operations/{operation.id}"})

    @app.post("/v1/operations")
    async def post_operation(request: Request) -> Response:
        body = await read_body(request)
        unknown = body.keys() - {"verb", "target", "params", "reason", "dry_run", "wait"}
        if unknown:
            raise RequestError(f"{min(unknown)}: not a field of an operation", param=min(unknown))
        params = body.get("params") or {}
        if not isinstance(params, dict):
            raise RequestError("params: not an object", param="params")
        target = {"target": body["target"]} if body.get("target") is not None else {}
        common = {name: body[name] for name in ("reason", "dry_run", "wait") if body.get(name) is not None}
        return await change(request, text(body.get("verb"), "verb"), {**params, **target, **common})

    def route(verb: str) -> None:
        @app.post(f"/v1/{verb}")
        async def post(request: Request) -> Response:
            return await change(request, verb, {**dict(request.query_params), **await read_body(request)})

    for verb in VERBS:
        route(verb)


async def _outcome(work: asyncio.Task[Operation]) -> None:
    """Its record tells how it ended; nobody else is to be told of an error that has been told."""
    await asyncio.wait([work])
    work.exception() if not work.cancelled() else None
