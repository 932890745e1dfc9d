"""`GET /v1/config`: every key with its effective value, where it was written, and how it may change. Secrets are left out."""

from __future__ import annotations

from typing import Any

import msgspec

from llmd.config.values import value_of
from llmd.control.core import Core


def config(core: Core) -> dict[str, Any]:
    """The configuration that is in effect. `written` is false for what llmd found out by itself."""
    from llmd.config.fields import FIELDS
    from llmd.config.show import value_text

    args, source = core.boot.args, core.boot.source
    rows = []
    for key, field in FIELDS.items():
        value = value_of(args, key)
        origin = source.origins.get(key, "default") if source is not None else "caller"
        resolved = source is not None and value_of(source.args, key) != value
        rows.append(
            {
                "key": key,
                "value": _redacted(msgspec.to_builtins(value)),
                "text": value_text(field, value),
                "origin": origin,
                "resolved": resolved,
                "reload": field.reload,
            }
        )
    return {"config_file": source.config_file if source is not None else None, "values": rows}


def _redacted(value: Any) -> Any:
    from llmd.config.show import redact_url

    if isinstance(value, str):
        return redact_url(value) if "://" in value else value
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return {name: _redacted(item) for name, item in value.items()} if isinstance(value, dict) else value
