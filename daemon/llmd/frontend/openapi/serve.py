"""GET /openapi.json and GET /docs: the document as written, and a page made of it. The page is whole in itself: no script, nothing from elsewhere."""

from __future__ import annotations

import html
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from llmd.frontend.exchange import Receive, Scope, Send
from llmd.frontend.replies import JSON, reply

DOCUMENT: Final = Path(__file__).with_name("openapi.json")
_HTML: Final = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
]
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}code{background:#f2f2f2;padding:0 .2em}"
    "table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #ddd;text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0}"
    "summary{cursor:pointer;padding:.3rem 0}details{border-top:1px solid #ccc}@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}"
    "code{background:#2a2a2a}td,th,details{border-color:#444}}"
)


async def openapi(scope: Scope, receive: Receive, send: Send) -> None:
    """The document."""
    await reply(send, 200, _document(), [JSON])


async def docs(scope: Scope, receive: Receive, send: Send) -> None:
    """The page."""
    await reply(send, 200, _page(), _HTML)


@cache
def _document() -> bytes:
    return DOCUMENT.read_bytes()


@cache
def _page() -> bytes:
    return page(json.loads(_document())).encode()


def page(document: dict[str, Any]) -> str:
    """Every path with its body's fields and its answers."""
    schemas = document["components"]["schemas"]
    parts = [f"<h1>llmd {_text(document['info']['version'])}</h1><p>{_text(document['info']['description'])}</p>"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(method.upper(), path, operation, schemas))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>llmd</title><style>{_STYLE}</style>"
    return head + "".join(parts) + "</html>\n"


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = ""
    if "requestBody" in operation:
        body = "<h4>Body</h4>" + _fields(operation["requestBody"]["content"]["application/json"]["schema"], schemas)
    answers = "".join(f"<tr><td><code>{_text(status)}</code><td>{_text(found['description'])}" for status, found in operation["responses"].items())
    summary = f"<summary><code>{method} {_text(path)}</code> {_text(operation['summary'])}</summary>"
    return f"<details>{summary}{body}<h4>Answers</h4><table>{answers}</table></details>"


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    found = _resolved(schema, schemas)
    required = found.get("required", ())
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code>{' (required)' if name in required else ''}<td>{_kind(field, schemas)}<td>{_text(field.get('description', ''))}"
        for name, field in found.get("properties", {}).items()
    )
    return f"<p>{_text(found.get('description', ''))}</p><table><tr><th>field<th>takes<th>{rows}</table>"


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<details><summary>{_text(name)}</summary>{_fields(schema, schemas)}</details>"
    if "anyOf" in schema:
        return " or ".join(_kind(option, schemas) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"<code>{_text(json.dumps(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}{_limits(schema)}"
    return _text(str(schema.get("type", "anything"))) + _limits(schema)


def _limits(schema: dict[str, Any]) -> str:
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "minLength": "length >=", "maxLength": "length <=", "maxItems": "at most"}
    found = [f"{word} {schema[name]}" for name, word in words.items() if name in schema]
    return _text(f" ({', '.join(found)})") if found else ""


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _text(value: str) -> str:
    return html.escape(str(value))
