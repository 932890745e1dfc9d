"""Penalties and `logit_bias`, which chat, completions and the native API share."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from llmd.frontend.fields import Fields, fault
from llmd.frontend.limits import MAX_LOGIT_BIAS, MAX_PENALTY


class Penalties(Struct, frozen=True, kw_only=True):
    """As in SamplingParams."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


def read_penalties(fields: Fields, vocabulary: int) -> Penalties:
    """Read and check the four fields."""
    return Penalties(
        presence=fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        frequency=fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        repetition=fields.number("repetition_penalty", 0.0, MAX_PENALTY, 1.0, open_low=True),
        logit_bias=_logit_bias(fields, vocabulary),
    )


def _logit_bias(fields: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    value = fields.mapping("logit_bias")
    path = fields.path("logit_bias")
    if not value:
        return ()
    if len(value) > MAX_LOGIT_BIAS:
        raise fault(path, f"may hold at most {MAX_LOGIT_BIAS} ids")
    return tuple((_id(path, name, vocabulary), _bias(path, name, bias)) for name, bias in value.items())


def _id(path: str, name: str, vocabulary: int) -> int:
    """A token id as JSON names it: decimal digits, no sign, no leading zero, so that none comes twice."""
    if name.isascii() and name.isdigit() and len(name) <= len(str(vocabulary)) and str(int(name)) == name and int(name) < vocabulary:
        return int(name)
    raise fault(path, f"{_shown(name)} is not a token id from 0 to {vocabulary - 1}")


def _bias(path: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not -100 <= value <= 100:
        raise fault(path, f"the bias of id {name} must be a number from -100 to 100")
    return float(value)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 32 else name[:32] + "...")
