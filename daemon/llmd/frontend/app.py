"""The data plane's application: routes, error envelopes, lifespan. Every answer that is not 2xx has the envelope."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmd.errors import RequestError
from llmd.frontend.access import Access, Guard, KeyRing
from llmd.frontend.body import ClientGone
from llmd.frontend.exchange import CLIENT_GONE, exchange_of, outcome_of
from llmd.frontend.gate import App, Gate
from llmd.frontend.health import Health, HealthGenerate, Metrics, livez
from llmd.frontend.native.admin import ALIASES, NOT_BUILT, AdminAlias
from llmd.frontend.native.generate import Generate
from llmd.frontend.native.info import ModelInfo, ServerInfo
from llmd.frontend.native.tokenize import Detokenize, Tokenize
from llmd.frontend.openai.chat import ChatCompletions
from llmd.frontend.openai.completions import Completions
from llmd.frontend.openai.embeddings import Embeddings
from llmd.frontend.openai.models import Model, Models
from llmd.frontend.openapi.serve import docs, openapi
from llmd.frontend.rates import RateLimits
from llmd.frontend.replies import error_body, error_headers, internal_error, reply_json
from llmd.frontend.runtime import Runtime

_CODES: Final = {404: "not_found", 405: "method_not_allowed"}
_SOME_PATHS: Final = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /readyz"
#: A longer path is not repeated to whoever asked for it.
_PATH_SHOWN: Final = 128


def create_app(runtime: Runtime, lifespan: AbstractAsyncContextManager[None], limits: RateLimits | None = None) -> Gate:
    """The ASGI application of one frontend. `limits`: of keys, where they are not this frontend's alone."""
    routes = _routes(runtime)
    app = Starlette(routes=routes, lifespan=lambda _: lifespan)
    app.router.redirect_slashes = False
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)
    http = runtime.boot.args.http
    guard = Guard(
        runtime.boot.args,
        access_of(routes) | dict.fromkeys(NOT_BUILT, Access.ADMIN),
        KeyRing(http.api_keys_file, http.admin_key_file),
        limits or RateLimits(time.monotonic),
    )
    return Gate(app, runtime, guard, [route.path for route in routes])


def access_of(routes: list[Route]) -> dict[str, Access]:
    """The class of each path. Raises TypeError for a route that has none of its own, so that nobody adds one without a thought."""
    found: dict[str, Access] = {}
    for route in routes:
        if not isinstance(route.endpoint, _Asgi):
            raise TypeError(f"{route.path} says nothing of who may use it")
        found[route.path] = route.endpoint.access
    return found


def _routes(runtime: Runtime) -> list[Route]:
    ready = Health(runtime, "ready")
    routes = [
        _route(ChatCompletions.path, ChatCompletions(runtime), Access.KEY, "POST"),
        _route(Completions.path, Completions(runtime), Access.KEY, "POST"),
        _route(Embeddings.path, Embeddings(runtime), Access.KEY, "POST"),
        _route(Generate.path, Generate(runtime), Access.KEY, "POST"),
        *(_route(path, Tokenize(runtime), Access.KEY, "POST") for path in Tokenize.paths),
        *(_route(path, Detokenize(runtime), Access.KEY, "POST") for path in Detokenize.paths),
        *(_route(path, ModelInfo(runtime), Access.KEY) for path in ModelInfo.paths),
        *(_route(path, ServerInfo(runtime), Access.KEY) for path in ServerInfo.paths),
        *(_route(alias.path, AdminAlias(runtime, alias), Access.ADMIN, *alias.methods) for alias in ALIASES),
        _route("/v1/models", Models(runtime), Access.KEY),
        _route("/v1/models/{model:path}", Model(runtime), Access.KEY),
        _route("/livez", livez, Access.OPEN),
        _route("/ping", livez, Access.OPEN),
        _route("/readyz", ready, Access.OPEN),
        _route("/health", ready, Access.OPEN),
        _route("/startupz", Health(runtime, "started"), Access.OPEN),
        _route("/health_generate", HealthGenerate(runtime), Access.OPEN),
        _route("/metrics", Metrics(runtime), Access.METRICS),
    ]
    routes += [_route("/openapi.json", openapi, Access.KEY), _route("/docs", docs, Access.KEY)]
    return [*routes, _route("/", _Index(runtime, routes), Access.KEY)]


def _route(path: str, app: App, access: Access, *methods: str) -> Route:
    """GET where no method is named. HEAD goes with it only where a GET changes nothing."""
    route = Route(path, _Asgi(app, access), methods=list(methods or ("GET",)))
    if access is Access.ADMIN and route.methods is not None:
        route.methods.discard("HEAD")
    return route


class _Asgi:
    """Marks a callable as ASGI for starlette, which takes functions for request handlers."""

    def __init__(self, app: App, access: Access) -> None:
        self.access = access
        self._app = app
        self.__name__ = getattr(app, "__name__", type(app).__name__)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def _respond(request: Request, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    exchange_of(request.scope).settle(outcome_of(error))
    return Response(error_body(error), error.status, {**(headers or {}), **error_headers(error)}, "application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _respond(request, error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    exchange_of(request.scope).settle("client_disconnect")
    return Response(status_code=CLIENT_GONE)


async def _on_fault(request: Request, error: Exception) -> Response:
    """The answer to an error of our own; starlette raises it again afterwards, and the gate logs it."""
    return _respond(request, internal_error())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.url.path
    if path in NOT_BUILT:
        return _respond(request, RequestError(NOT_BUILT[path], status=501))
    shown = path if path.isprintable() and len(path) <= _PATH_SHOWN else "the path"
    message = {
        404: f"{shown} is not served here; there are {_SOME_PATHS}, and GET / lists all",
        405: f"{shown} takes {headers.get('Allow', 'another method')}, not {request.method}",
    }.get(error.status_code, "the request cannot be handled")
    return _respond(request, RequestError(message, code=_CODES.get(error.status_code), status=error.status_code), headers)


class _Index:
    """GET /: what there is, for whoever opens the address in a browser."""

    def __init__(self, runtime: Runtime, routes: list[Route]) -> None:
        paths = [f"{method} {route.path.replace(':path', '')}" for route in routes for method in sorted(route.methods or ()) if method != "HEAD"]
        paths.append("GET /")
        self._body = {"service": "llmd", "model": runtime.boot.served_name, "paths": paths}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await reply_json(send, 200, self._body)
