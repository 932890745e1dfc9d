"""The OpenAPI document, made of the types beside it: `python -m llmd.frontend.openapi.document` writes it to where the frontends read it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llmd import __version__
from llmd.errors import CODES
from llmd.frontend.openapi import answers, bodies
from llmd.frontend.openapi.serve import DOCUMENT

_REF: Final = "#/components/schemas/{model}"
_TEXT: Final = {"text/plain": {"schema": {"type": "string"}}}

#: (path, body, answer, summary) of each POST.
POSTS: Final[tuple[tuple[str, type[BaseModel], type[BaseModel], str], ...]] = (
    ("/v1/chat/completions", bodies.ChatCompletionRequest, answers.ChatCompletion, "Answer a conversation"),
    ("/v1/completions", bodies.CompletionRequest, answers.Completion, "Go on with a text"),
    ("/v1/embeddings", bodies.EmbeddingRequest, answers.Embeddings, "Turn texts into vectors"),
    ("/generate", bodies.GenerateRequest, answers.Generated, "Go on with a prompt or a batch, as SGLang has it"),
    ("/v1/tokenize", bodies.TokenizeRequest, answers.Tokenized, "Turn a text or messages into token ids"),
    ("/tokenize", bodies.TokenizeRequest, answers.Tokenized, "The same as /v1/tokenize"),
    ("/v1/detokenize", bodies.DetokenizeRequest, answers.Detokenized, "Turn token ids into text"),
    ("/detokenize", bodies.DetokenizeRequest, answers.Detokenized, "The same as /v1/detokenize"),
    ("/flush_cache", bodies.FlushRequest, answers.Done, "Forget all cached prefixes"),
    ("/abort_request", bodies.AbortRequest, answers.Done, "End requests"),
    ("/update_weights_from_disk", bodies.ReloadRequest, answers.Done, "Load other weights"),
)
#: (path, answer or None for text, summary) of each GET.
GETS: Final[tuple[tuple[str, type[BaseModel] | None, str], ...]] = (
    ("/", answers.AnyObject, "What there is"),
    ("/v1/models", answers.ModelList, "The served model, as a list"),
    ("/v1/models/{model}", answers.ModelCard, "One model"),
    ("/model_info", answers.AnyObject, "The model, as SGLang has it"),
    ("/get_model_info", answers.AnyObject, "The same as /model_info"),
    ("/server_info", answers.AnyObject, "Model, configuration and state"),
    ("/get_server_info", answers.AnyObject, "The same as /server_info"),
    ("/livez", answers.Health, "Whether the process answers"),
    ("/ping", answers.Health, "The same as /livez"),
    ("/readyz", answers.Health, "Whether it can generate now"),
    ("/health", answers.Health, "The same as /readyz"),
    ("/startupz", answers.Health, "Whether the start is over"),
    ("/health_generate", answers.Health, "Generates one token"),
    ("/metrics", None, "Prometheus"),
    ("/openapi.json", answers.AnyObject, "This document"),
    ("/docs", None, "This document as a page"),
    ("/flush_cache", answers.Done, "The same as by POST"),
)
#: Path -> what one event of its streams holds.
STREAMED: Final[dict[str, type[BaseModel]]] = {
    "/v1/chat/completions": answers.ChatCompletionChunk,
    "/v1/completions": answers.CompletionChunk,
    "/generate": answers.Generated,
}
OPEN: Final = ("/livez", "/ping", "/readyz", "/health", "/startupz", "/health_generate", "/metrics")
ADMIN: Final = ("/flush_cache", "/abort_request", "/update_weights_from_disk")
_HEALTH: Final = ("/readyz", "/health", "/startupz")


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    models: list[type[BaseModel]] = [
        answers.Error,
        *STREAMED.values(),
        *(m for _, body, answer, _ in POSTS for m in (body, answer)),
        *(a for _, a, _ in GETS if a),
    ]
    _, schemas = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF)
    paths = {path: {"post": _post(path, body, answer, summary)} for path, body, answer, summary in POSTS}
    for path, gives, summary in GETS:
        paths.setdefault(path, {})["get"] = _get(path, gives, summary)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmd",
            "version": __version__,
            "description": "OpenAI's API and SGLang's. Unknown fields are ignored, or refused with `http.strict`; null is the default of any field.",
        },
        "paths": paths,
        "components": {
            "schemas": _plain(schemas["$defs"]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _post(path: str, body: type[BaseModel], answer: type[BaseModel], summary: str) -> dict[str, Any]:
    one = _json(answer)
    if path == "/generate":
        reference = one["application/json"]["schema"]
        one = {"application/json": {"schema": {"anyOf": [reference, {"type": "array", "items": reference}]}}}
    done = "Done. With `stream: true`: `data: {...}` events, then `data: [DONE]`; an error after the first is an event too." if path in STREAMED else "Done."
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": path != "/flush_cache", "content": _json(body)},
        "responses": {"200": {"description": done, "content": {**one, **_events(path)}}, **_errors(path, post=True)},
        **_security(path),
    }


def _events(path: str) -> dict[str, Any]:
    """An event as OpenAPI 3.2 describes one: its data is text, and that text JSON, or the `[DONE]` of the last. An error is one kind of it."""
    if path not in STREAMED:
        return {}
    kinds = [{"$ref": _REF.format(model=model.__name__)} for model in (STREAMED[path], answers.Error)]
    data = {"anyOf": [{"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}, {"const": "[DONE]"}]}
    return {"text/event-stream": {"schema": {"type": "object", "required": ["data"], "properties": {"data": data}}}}


def _get(path: str, answer: type[BaseModel] | None, summary: str) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_") or "index"
    text = {"text/html": {"schema": {"type": "string"}}} if path == "/docs" else _TEXT
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{name}_by_get" if path in ADMIN else name,
        "responses": {"200": {"description": "Done.", "content": _json(answer) if answer else text}, **_errors(path, post=path in ADMIN)},
        **_security(path),
    }
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    return operation


def _errors(path: str, *, post: bool) -> dict[str, Any]:
    """The statuses that the table of codes has, where this path can give them."""
    if path in _HEALTH:
        return {"503": {"description": "Not now: the state says why.", "content": _json(answers.Health)}}
    statuses = [400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504] if post else [400, 401, 404, 503] if "{" in path else [400, 401, 503]
    return {str(status): {"description": _codes(status), "content": _json(answers.Error)} for status in statuses}


def _codes(status: int) -> str:
    return ", ".join(code for code, (known, _) in CODES.items() if known == status) or "no code; the message says what it is"


def _security(path: str) -> dict[str, Any]:
    return {"security": []} if path in OPEN else {"security": [{"key": []}]} if path in ADMIN else {}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _plain(schema: Any) -> Any:
    """Without pydantic's titles, which repeat the names."""
    if isinstance(schema, dict):
        return {name: _plain(value) for name, value in schema.items() if not (name == "title" and isinstance(value, str))}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def text() -> str:
    """As it is written."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DOCUMENT).write_text(text(), encoding="utf-8")
