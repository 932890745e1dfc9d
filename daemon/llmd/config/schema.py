"""The JSON schema of the configuration file, from the fields: for editors that complete and check YAML while it is written."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from llmd.config.fields import FIELDS, SECTIONS, Field
from llmd.config.units import DURATION_PATTERN, SIZE_PATTERN, format_duration, format_size


def schema() -> str:
    """etc/llmd/llmd.schema.json."""
    root = _object("The configuration of llmd. Every key is optional.")
    for section, text in SECTIONS.items():
        _section(root, section)["description"] = text
    for field in FIELDS.values():
        _section(root, field.section)["properties"][field.leaf] = _key(field)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **root}, indent=1) + "\n"


def _object(text: str) -> dict[str, Any]:
    return {"description": text, "type": "object", "properties": {}, "additionalProperties": False}


def _section(root: dict[str, Any], name: str) -> dict[str, Any]:
    for part in filter(None, name.split(".")):
        root = root["properties"].setdefault(part, _object(""))
    return root


def _key(field: Field) -> dict[str, Any]:
    found = msgspec.json.schema(field.annotation)
    extra = {"description": f"{field.text} [{field.reload}]", "default": _written(msgspec.to_builtins(field.default), field.unit)}
    return {**_with_units(found, field.unit), **extra}


def _with_units(node: Any, unit: str | None) -> Any:
    """Numbers with a unit are written as text like `30s` or `8MiB`; a bare number is a duration of 0 or a size in bytes."""
    if unit is None:
        return node
    if isinstance(node, list):
        return [_with_units(item, unit) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") in ("number", "integer"):
        text = {"type": "string", "pattern": DURATION_PATTERN if unit == "s" else SIZE_PATTERN}
        return {"anyOf": [text, {"const": 0} if unit == "s" else {"type": "integer"}]}
    return {key: _with_units(value, unit) if key in ("anyOf", "prefixItems", "items") else value for key, value in node.items()}


def _written(value: Any, unit: str | None) -> Any:
    if isinstance(value, list | tuple):
        return [_written(item, unit) for item in value]
    if unit is None or isinstance(value, bool | str) or value is None:
        return value
    return format_duration(value) if unit == "s" else format_size(value)
