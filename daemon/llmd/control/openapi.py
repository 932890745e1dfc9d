"""The admin plane's OpenAPI document, made from the verbs' parameters and the records' types: `python -m llmd.control.openapi ROOT` writes docs/admin-api.json.

A test compares the file with what this makes, and its paths with the routes, so that neither drifts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from llmd import __version__
from llmd.control.events import Event
from llmd.control.operation import Operation
from llmd.control.plan import Plan
from llmd.control.verbs import VERBS

FILE = "docs/admin-api.json"
_REF = "#/components/schemas/{name}"

#: path -> (what it answers, schema of the answer). Objects without a schema of their own are described in docs/operations.md.
_READS: dict[str, tuple[str, str]] = {
    "/v1/status": ("State, processes, requests, KV cache, throughput. The same keys in every state.", "Status"),
    "/v1/processes": ("All processes of the plan, the supervisor first.", "Processes"),
    "/v1/kv": ("Pages by state, hit rate of the prefix cache, its biggest prefixes, who holds most.", "Object"),
    "/v1/requests": ("Requests in flight, oldest first.", "Requests"),
    "/v1/history": ("The last 15 minutes, a sample every 5 seconds, oldest first: speeds, requests, KV in use, medians of the minute before.", "History"),
    "/v1/weights": ("The weights that are served.", "Object"),
    "/v1/config": ("Every key with its effective value, its origin, and how it changes.", "Object"),
    "/v1/operations": ("Operations, newest first.", "Operations"),
    "/v1/operations/{number}": ("One operation.", "Operation"),
    "/v1/audit": ("Audit lines, newest first.", "Object"),
    "/v1/crashes": ("Records of processes that ended by themselves or hung, newest first.", "Object"),
    "/v1/openapi.json": ("This document.", "Object"),
}
_QUERY: dict[str, list[tuple[str, str]]] = {
    "/v1/audit": [("limit", "How many lines at most; 100.")],
    "/v1/crashes": [("limit", "How many records at most; 50.")],
    "/v1/events": [("since", "Only events after this number."), ("follow", "false: those that there are, as JSON.")],
}
_COMMON = {
    "dry_run": {"type": "boolean", "default": False, "description": "Answer with the plan, and do nothing."},
    "wait": {"type": "boolean", "default": True, "description": "false: 202 with the operation's record as soon as it has begun."},
    "reason": {"type": "string", "default": "", "description": "For the audit."},
}


def document() -> dict[str, Any]:
    """The whole document."""
    kinds = list(dict.fromkeys(VERBS.values()))
    _, schemas = msgspec.json.schema_components([Operation, Plan, Event, *kinds], ref_template=_REF)
    schemas = _strip(schemas) | _objects()
    paths: dict[str, Any] = {path: {"get": _read(path, text, schema)} for path, (text, schema) in _READS.items()}
    paths["/v1/events"] = {"get": _events()}
    paths["/metrics"] = {"get": {"summary": "Prometheus text.", "responses": {"200": {"description": "ok", "content": {"text/plain": {}}}}}}
    paths["/v1/operations"]["post"] = _change("Run a verb by its general form.", _general())
    for verb, kind in VERBS.items():
        paths[f"/v1/{verb}"] = {"post": _change((kind.__doc__ or "").strip().partition("\n")[0], _body(schemas[kind.__name__]))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmd admin plane", "version": __version__, "description": _DESCRIPTION},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


_DESCRIPTION = (
    "On RUN/admin.sock for whoever may use the socket; on admin.listen for whoever has the admin key. Reads come from control's picture, "
    "which is a heartbeat old at most; no rank is asked. Requests with Origin, Referer or Sec-Fetch-* are refused."
)


def text() -> str:
    """The file."""
    return json.dumps(document(), indent=1, sort_keys=False) + "\n"


def _strip(schemas: Any) -> Any:
    """What runs prepare for themselves is nobody's business, and no schema either."""
    schemas["Plan"]["properties"].pop("prepared", None)
    return schemas


def _objects() -> dict[str, Any]:
    def ref(name: str) -> dict[str, str]:
        return {"$ref": _REF.format(name=name)}

    counts = {"type": "object", "additionalProperties": {"type": "number"}}
    numbers = {"type": "object", "required": ["age_s"], "additionalProperties": {"type": ["number", "null"]}}
    status_keys = ("state", "stage", "reason", "degraded", "epoch", "weights_version", "model", "uptime_s", "processes", "requests", "kv", "throughput")
    return {
        "Object": {"type": "object"},
        "Status": {"type": "object", "required": list(status_keys), "properties": {"state": {"type": "string"}, "requests": counts, "kv": counts}},
        "Processes": {"type": "object", "required": ["processes"], "properties": {"processes": {"type": "array", "items": {"type": "object"}}}},
        "Requests": {
            "type": "object", "required": ["requests", "total", "age_s"], "properties": {"requests": {"type": "array", "items": {"type": "object"}}},
        },
        "History": {
            "type": "object", "required": ["every_s", "span_s", "samples"],
            "properties": {"every_s": {"type": "number"}, "span_s": {"type": "number"}, "samples": {"type": "array", "items": numbers}},
        },
        "Operations": {"type": "object", "required": ["operations"], "properties": {"operations": {"type": "array", "items": ref("Operation")}}},
        "Planned": {"type": "object", "required": ["verb", "params", "dry_run", "plan"], "properties": {"dry_run": {"const": True}, "plan": ref("Plan")}},
        "Error": {
            "type": "object", "required": ["error"],
            "properties": {
                "error": {
                    "type": "object", "required": ["message", "type", "param", "code", "hint", "operation_id"],
                    "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code", "hint", "operation_id")},
                },
                "operation": ref("Operation"),
            },
        },
    }  # fmt: skip


def _json(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=schema)}}}}


def _read(path: str, summary: str, schema: str) -> dict[str, Any]:
    parameters = [{"name": "number", "in": "path", "required": True, "schema": {"type": "string"}}] if "{number}" in path else []
    parameters += [{"name": name, "in": "query", "description": what, "schema": {"type": "string"}} for name, what in _QUERY.get(path, [])]
    responses = {"200": {"description": "ok", **_json(schema)}, "default": {"description": "refused", **_json("Error")}}
    return {"summary": summary, **({"parameters": parameters} if parameters else {}), "responses": responses}


def _events() -> dict[str, Any]:
    made = _read("/v1/events", "Events as they happen, resumable by number (SSE: id, event, data).", "Object")
    made["parameters"].append({"name": "Last-Event-ID", "in": "header", "description": "As `since`.", "schema": {"type": "string"}})
    made["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"$ref": _REF.format(name="Event")}}
    return made


def _body(kind: dict[str, Any]) -> dict[str, Any]:
    properties = {**kind.get("properties", {}), **_COMMON}
    return {"type": "object", "additionalProperties": False, "properties": properties, **({"required": kind["required"]} if kind.get("required") else {})}


def _general() -> dict[str, Any]:
    fields = {"verb": {"enum": list(VERBS)}, "target": {"type": ["string", "null"]}, "params": {"type": "object"}, **_COMMON}
    return {"type": "object", "additionalProperties": False, "required": ["verb"], "properties": fields}


def _change(summary: str, body: dict[str, Any]) -> dict[str, Any]:
    key = {"name": "Idempotency-Key", "in": "header", "description": "The same key again is answered with the same operation.", "schema": {"type": "string"}}
    done = {"schema": {"oneOf": [{"$ref": _REF.format(name="Operation")}, {"$ref": _REF.format(name="Planned")}]}}
    responses = {
        "200": {"description": "done, or planned", "content": {"application/json": done}},
        "202": {"description": "begun (wait=false)", **_json("Operation")},
        "409": {"description": "in conflict; operation_id names who is in the way, hint says what to do", **_json("Error")},
        "default": {"description": "refused or failed", **_json("Error")},
    }
    return {"summary": summary, "parameters": [key], "requestBody": {"content": {"application/json": {"schema": body}}}, "responses": responses}


def main(argv: list[str]) -> int:
    """Write the file below the directory given."""
    (Path(argv[0] if argv else ".") / FILE).write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
