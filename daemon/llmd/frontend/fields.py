"""`Fields`: typed reading of one JSON object of a client, field by field, with the fault named as the client wrote it.

null always means the documented default. Every fault is a RequestError 400 whose `param` is the field's path.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

from llmd.errors import RequestError

#: The smallest positive number in a request: smaller ones are zero, or not exact, in the float32 that logits are made of.
TINY: Final = 1e-30


def fault(param: str, message: str) -> RequestError:
    """The 400 for one field."""
    return RequestError(f"{param}: {message}", param=param)


def check_text(text: str, param: str) -> str:
    """Return `text` if it can be encoded as UTF-8: JSON escapes can also spell lone surrogates, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise fault(param, "is not valid Unicode: it holds a lone surrogate") from None
    return text


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer (true and false are not)."""
    return type(value) is int


class Fields:
    """Reader of one object; remembers which fields were known, so that `finish` can refuse the others."""

    def __init__(self, data: dict[str, Any], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix
        self._known: set[str] = set()
        self._children: list[Fields] = []

    def path(self, name: str) -> str:
        """The field's name as errors give it."""
        return self._prefix + name

    def get(self, name: str) -> Any:
        """The raw value, None where absent or null."""
        self._known.add(name)
        return self._data.get(name)

    def ignore(self, *names: str) -> None:
        """Fields that are known and have no effect here."""
        self._known.update(names)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise fault(self.path(name), "must be true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not is_int(value):
            raise fault(self.path(name), "must be an integer")
        if not low <= value <= high:
            raise fault(self.path(name), f"must be from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float, default: float, *, open_low: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with `open_low`. One too small to compute with becomes 0, or the smallest that is."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fault(self.path(name), "must be a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise fault(self.path(name), "must be a finite number")
        if value < low or value > high or (open_low and value == low):
            raise fault(self.path(name), f"must be {'greater than' if open_low else 'at least'} {low:g} and at most {high:g}")
        if 0 < abs(value) < TINY:
            return TINY if open_low else 0.0
        return float(value)

    def string(self, name: str, *, longest: int) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise fault(self.path(name), "must be a string")
        if len(value) > longest:
            raise fault(self.path(name), f"must have at most {longest} characters")
        return check_text(value, self.path(name))

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise fault(self.path(name), "must be an object")
        return value

    def child(self, name: str) -> Fields | None:
        """The reader of an object inside this one; `finish` looks at its fields too."""
        data = self.mapping(name)
        return None if data is None else self.nested(data, name)

    def nested(self, data: dict[str, Any], name: str) -> Fields:
        """The reader of an object that stands at `name` inside this one, like `messages[0]`; `finish` looks at its fields too."""
        self._children.append(Fields(data, self.path(name) + "."))
        return self._children[-1]

    def starting(self, prefix: str) -> list[str]:
        """Names of the fields that are there and begin so."""
        return [name for name in self._data if name.startswith(prefix) and name.isidentifier() and len(name) <= 64]

    def neutral(self, *names: str, values: Collection[Any] = (), why: str = "is not supported by this server") -> None:
        """Refuse fields that have no effect yet, unless they are absent, null or one of `values`."""
        for name in names:
            value = self.get(name)
            if value is None or any(type(value) is type(v) and value == v for v in values):
                continue
            raise fault(self.path(name), why)

    def finish(self, *, strict: bool) -> None:
        """With `strict`, refuse fields that nobody knows."""
        if not strict:
            return
        for name in self._data:
            if name not in self._known:
                shown = name if name.isprintable() and len(name) <= 64 else "field"
                raise fault(self.path(shown), "is not a known field")
        for child in self._children:
            child.finish(strict=True)
