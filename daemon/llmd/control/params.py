"""From a query string and a JSON object to a verb's typed parameters; every fault is a 400 that names the parameter."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec

from llmd.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.(?P<where>[^`]+)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]+)`")


def convert(raw: dict[str, Any], kind: type[T]) -> T:
    """Raises RequestError."""
    for name, value in raw.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: not a finite number", param=name)
    try:
        params = msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        field = _FIELD.search(str(error))
        where = (match["where"] if match else None) or (field["name"] if field else None)
        raise RequestError(f"{where}: {match['what'] if match else error}" if where else str(error), param=where) from None
    for name in kind.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: not a finite number", param=name)
    return params
