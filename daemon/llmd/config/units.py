"""Durations and sizes as the configuration writes them: `500ms`, `30s`, `10min`, `8MiB`, `1GB`.

Reading and writing are exact inverses: what `format_*` writes, `parse_*` reads back to the same number.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

#: Unit -> seconds, largest first.
DURATIONS: Final = {"d": Decimal(86400), "h": Decimal(3600), "min": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
#: Unit -> bytes, largest first.
SIZES: Final = {
    "TiB": 2**40,
    "TB": 10**12,
    "GiB": 2**30,
    "GB": 10**9,
    "MiB": 2**20,
    "MB": 10**6,
    "KiB": 2**10,
    "kB": 10**3,
    "KB": 10**3,
    "B": 1,
}
#: poll(2) takes milliseconds in a signed 32-bit number: 24.8 days.
LONGEST: Final = 24 * 86400

#: The two in a JSON schema.
DURATION_PATTERN: Final = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(DURATIONS)})$"
SIZE_PATTERN: Final = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(SIZES)})?$"

#: ASCII digits alone: \d would take any script's.
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_duration(text: str) -> float:
    """Seconds of `30s`, `500ms`, `10min`, `1h`, `1d` or a bare `0`. Raises ValueError with what to write instead."""
    match = _QUANTITY.fullmatch(text)
    if match is None or len(match[1]) > 30:
        raise ValueError("expected a duration like 500ms, 30s, 10min or 1h")
    if not match[2] and Decimal(match[1]) != 0:
        raise ValueError(f"a duration needs a unit: {text}s, {text}ms or {text}min")
    unit = DURATIONS.get(match[2] or "s")
    if unit is None:
        raise ValueError(f"unknown unit {match[2]!r}: use ms, s, min, h or d")
    seconds = float(Decimal(match[1]) * unit)
    if seconds > LONGEST:
        raise ValueError("at most 24d")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of `8MiB`, `1GB`, `512KiB` or a bare number. Raises ValueError with what to write instead."""
    match = _QUANTITY.fullmatch(text)
    if match is None or len(match[1]) > 30:
        raise ValueError("expected a size like 512KiB, 8MiB or 1GB")
    unit = SIZES.get(match[2] or "B")
    if unit is None:
        raise ValueError(f"unknown unit {match[2]!r}: use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    size = Decimal(match[1]) * unit
    if size != int(size) or size >= 2**63:
        raise ValueError("expected a whole number of bytes below 8EiB")
    return int(size)


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration."""
    exact = Decimal(repr(seconds))
    if exact == 0:
        return "0s"
    for name, unit in DURATIONS.items():
        count = exact / unit
        if count == int(count) and (count >= 2 or name == "ms" or (count == 1 and name != "min")):
            return f"{int(count)}{name}"
    return f"{exact:f}s"


def format_size(size: int) -> str:
    """The shortest exact way to write a size in binary units."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % SIZES[name] == 0:
            return f"{size // SIZES[name]}{name}"
    return f"{size}B"
