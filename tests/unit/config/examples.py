"""A value other than the default for every key, as somebody would write it."""

from __future__ import annotations

from typing import Any

from msgspec import inspect

from llmd.config.fields import FIELDS, Field, bare
from llmd.config.show import scalar


def other_value(field: Field) -> Any:
    """A legal value of `field` that is not its default."""
    return _other(field.type, field)


def other_text(field: Field) -> str:
    """The same in YAML."""
    return scalar(other_value(field), field.unit)


def _other(kind: inspect.Type, field: Field) -> Any:
    match bare(kind):
        case inspect.UnionType(types=types):
            return next(value for t in types if (value := _other(t, field)) not in (None, field.default))
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return field.default is not True
        case inspect.LiteralType(values=values):
            return next(value for value in values if value != field.default)
        case inspect.StrType():
            return "/other" if field.path else "other"
        case inspect.IntType() | inspect.FloatType() as number:
            if number.lt is not None:
                return number.lt / 2
            base = field.default if isinstance(field.default, int | float) else max(2, int(number.ge or 0))
            value = base + 1 if number.le is None or base + 1 <= number.le else base - 1
            return value if isinstance(number, inspect.IntType) else float(value)
        case inspect.TupleType(item_types=items):
            return tuple(float(n + 1) for n in range(len(items)))
        case inspect.VarTupleType(item_type=item):
            return (_other(item, field),)
        case inspect.DictType(value_type=value):
            return {"name": _other(value, field)}
    raise TypeError(f"no example for {field.key}")


ALL = [(key, other_value(field)) for key, field in FIELDS.items()]
