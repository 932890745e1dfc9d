"""The admin plane's application. Reads come from what control knows, changes are operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from llmd.control import configuration, crashes, exposition, openapi, peer, requests, status
from llmd.control.core import Core
from llmd.control.events import Event
from llmd.control.history import History
from llmd.control.http import Handler, add_errors, flag, get, json_response, post, read_body, text, while_connected, whole
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


def build(core: Core, operations: Operations, history: History) -> Starlette:
    """The application."""
    app = Starlette(routes=[*_reads(core, history), *_records(core, operations), *_events(core), *_changes(core, operations)])
    add_errors(app)
    return app


def _reads(core: Core, history: History) -> list[Route]:
    """What is read comes from control's picture, never from a rank."""

    async def get_status(request: Request) -> Response:
        return json_response(status.status(core, history.rates))

    async def get_processes(request: Request) -> Response:
        return json_response({"processes": status.processes(core)})

    async def get_kv(request: Request) -> Response:
        return json_response(requests.kv(core))

    async def get_requests(request: Request) -> Response:
        return json_response(requests.requests(core))

    async def get_history(request: Request) -> Response:
        return json_response(history.shown(time.monotonic()))

    async def get_config(request: Request) -> Response:
        return json_response(configuration.config(core))

    async def get_weights(request: Request) -> Response:
        return json_response(status.weights(core))

    async def get_openapi(request: Request) -> Response:
        return json_response(openapi.document())

    async def get_metrics(request: Request) -> Response:
        return Response(core.metrics_text, media_type=exposition.CONTENT_TYPE)

    return [
        get("/v1/status", get_status),
        get("/v1/processes", get_processes),
        get("/v1/kv", get_kv),
        get("/v1/requests", get_requests),
        get("/v1/history", get_history),
        get("/v1/config", get_config),
        get("/v1/weights", get_weights),
        get("/v1/openapi.json", get_openapi),
        get("/metrics", get_metrics),
    ]


def _records(core: Core, operations: Operations) -> list[Route]:
    """What has been done."""

    async def get_operations(request: Request) -> Response:
        return json_response({"operations": operations.newest_first()})

    async def get_operation(request: Request) -> Response:
        operation = operations.get(request.path_params["number"])
        if operation is None:
            raise RequestError("there is no such operation", code="not_found")
        return json_response(operation)

    async def get_audit(request: Request) -> Response:
        count = whole(request.query_params.get("limit", "100"), "limit", MAX_AUDIT)
        lines = await asyncio.get_running_loop().run_in_executor(None, operations.audit.newest, count)
        return json_response({"audit": lines})

    async def get_crashes(request: Request) -> Response:
        count = whole(request.query_params.get("limit", "50"), "limit", MAX_AUDIT)
        directory, unwritten = Path(core.boot.state_dir) / "crashes", core.snapshot.unwritten_crashes if core.snapshot is not None else ()
        return json_response({"crashes": await asyncio.get_running_loop().run_in_executor(None, crashes.newest, directory, count, unwritten)})

    return [
        get("/v1/operations", get_operations),
        get("/v1/operations/{number}", get_operation),
        get("/v1/audit", get_audit),
        get("/v1/crashes", get_crashes),
    ]


def _events(core: Core) -> list[Route]:
    """Events as they happen (SSE), from `since` on; with `follow=false` those that there are, as JSON."""

    async def get_events(request: Request) -> Response:
        query = request.query_params
        since = whole(query.get("since") or request.headers.get("last-event-id") or "0", "since", 2**53)
        if not flag(query.get("follow", "true"), "follow"):
            return json_response({"events": core.events.since(since), "last": core.events.last})
        return StreamingResponse(_stream(core, since), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    return [
        get("/v1/events", get_events),
    ]


async def _stream(core: Core, since: int) -> AsyncIterator[bytes]:
    yield b": llmd events\n\n"
    async for events in core.events.follow(since, PING):
        yield b"".join(map(_sse, events)) or b": ping\n\n"


def _sse(event: Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.seq, event.kind.encode(), msgspec.json.encode(event))


def _changes(core: Core, operations: Operations) -> list[Route]:
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
            operations.end(work, RequestError("the caller hung up", code="aborted"))
        return json_response(await work)

    async def _begun(work: asyncio.Task[Operation], begun: asyncio.Future[Operation]) -> Response:
        """202 with the record of what goes on; what is over by then is answered as ever."""
        await asyncio.wait([work, begun], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return json_response(await work)
        core.spawn(_outcome(work), "an operation that nobody waits for")
        operation = begun.result()
        return json_response(operation, 202, {"location": f"/v1/operations/{operation.id}"})

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

    def changed_by(verb: str) -> Handler:
        async def post_verb(request: Request) -> Response:
            return await change(request, verb, {**dict(request.query_params), **await read_body(request)})

        return post_verb

    return [post("/v1/operations", post_operation), *(post(f"/v1/{verb}", changed_by(verb)) for verb in VERBS)]


async def _outcome(work: asyncio.Task[Operation]) -> None:
    """Its record tells how it ended; nobody else is to be told of an error that has been told."""
    await asyncio.wait([work])
    work.exception() if not work.cancelled() else None
