"""Reading a value of the configuration by its key: for processes that need not know what all keys mean, which takes as long to import as all else here."""

from __future__ import annotations

from typing import Any

from llmd.config.server_args import ServerArgs


def value_of(args: ServerArgs, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = args
    for part in key.split("."):
        value = getattr(value, part)
    return value
