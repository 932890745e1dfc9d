"""What Python callers hand over, as the plain values that the checks of a request know: arrays and numbers of numpy, tuples, paths."""

from __future__ import annotations

import math
import os
from typing import Any, Final

from llmd.errors import RequestError

_PLAIN: Final = frozenset({str, int, float, bool})
#: Seconds; beyond that no timer goes.
_LONGEST: Final = 24 * 86400.0


def plain(value: Any) -> Any:
    """`value` with lists for arrays and tuples, Python's numbers for numpy's, and texts for the keys of objects. What it cannot be is left to the checks."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return value


def seconds(name: str, value: Any) -> float | None:
    """A wait, or None for none. Raises RequestError naming the argument."""
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= _LONGEST:
        raise RequestError(f"{name}: expected seconds from 0 to {_LONGEST:g}, got {value!r:.40}", param=name)
    return float(value)


def path(name: str, value: Any) -> str:
    """An absolute path; a relative one is taken from the caller's working directory. Raises RequestError naming the argument."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise RequestError(f"{name}: expected a path, got {value!r:.40}", param=name)
    return os.path.abspath(os.fsdecode(value))
