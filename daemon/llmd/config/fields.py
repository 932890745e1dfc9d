"""The keys of the configuration as a flat table, read from the fields of `ServerArgs`: nothing about a key is written twice.

`FIELDS` maps `http.drain_timeout` to what the loader, the shipped file, the documentation and `llmd check --print` need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_type_hints

from msgspec import Struct, inspect

from llmd.config.server_args import ServerArgs
from llmd.config.units import format_duration, format_size


class Field(Struct, frozen=True, kw_only=True):
    """One key."""

    key: str
    """Dotted, as in `--set`."""
    text: str
    reload: str
    """`live`, `engine` or `restart`."""
    unit: str | None
    """`s` or `B` if the number is a duration or a size."""
    path: bool | str
    """Whether it is a path; `or_name` where a bare word is a name."""
    default: Any
    annotation: Any
    """The annotated type, for msgspec.convert."""
    type: inspect.Type

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return "LLMD_" + self.key.upper().replace(".", "__")

    @property
    def is_text(self) -> bool:
        """Whether its value is text, or null."""
        return describe(self.type).startswith("text")

    @property
    def expects(self) -> str:
        """What may be written, in words."""
        words = describe(self.type, self.unit)
        return words.replace("text", "a path" if self.path is True else "a name or a path") if self.path else words


def bare(kind: inspect.Type) -> inspect.Type:
    """The type without its metadata."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def describe(kind: inspect.Type, unit: str | None = None) -> str:
    """A type in the words of an operator: `a whole number >= 1, or auto`."""
    match bare(kind):
        case inspect.UnionType(types=types):
            return ", or ".join(describe(t, unit) for t in sorted(types, key=lambda t: isinstance(bare(t), inspect.NoneType | inspect.LiteralType)))
        case inspect.NoneType():
            return "null"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}" if len(values) > 1 else str(values[0])
        case inspect.StrType():
            return "text"
        case inspect.IntType() | inspect.FloatType() as number:
            return _number(number, unit)
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {describe(items[0], unit)}"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each {describe(item, unit)}"
        case inspect.DictType(value_type=value):
            return f"a mapping of names, each to {describe(value, unit)}"
    raise TypeError(f"no words for {kind}")


def _number(number: inspect.IntType | inspect.FloatType, unit: str | None) -> str:
    if unit == "s":
        return f"a duration like 30s, at least {format_duration(number.ge)}" if number.ge else "a duration like 30s"
    if unit == "B":
        return f"a size like 8MiB, {format_size(int(number.ge or 0))} to {format_size(int(number.le or 0))}"
    signs = ((">", number.gt), (">=", number.ge), ("<", number.lt), ("<=", number.le))
    limits = " and ".join(f"{sign} {value if isinstance(value, int) else f'{value:g}'}" for sign, value in signs if value is not None)
    name = "a whole number" if isinstance(number, inspect.IntType) else "a number"
    return f"{name} {limits}".rstrip()


def _walk(info: inspect.Type, prefix: str, sections: dict[str, str]) -> Iterator[Field]:
    assert isinstance(info, inspect.StructType)
    hints = get_type_hints(info.cls, include_extras=True)
    for field in info.fields:
        meta = field.type
        assert isinstance(meta, inspect.Metadata)
        extra = meta.extra or {}
        text = (meta.extra_json_schema or {})["description"]
        key = f"{prefix}{field.name}"
        inner = bare(meta)
        if isinstance(inner, inspect.StructType):
            sections[key] = (inner.cls.__doc__ or text).strip()
            yield from _walk(inner, f"{key}.", sections)
        else:
            default = field.default if field.default_factory is inspect.NODEFAULT else field.default_factory()  # type: ignore[attr-defined]
            yield Field(
                key=key,
                text=text,
                reload=extra["reload"],
                unit=extra.get("unit"),
                path=extra.get("path", False),
                default=default,
                annotation=hints[field.name],
                type=meta,
            )


#: Dotted name of each section -> its text.
SECTIONS: Final[dict[str, str]] = {}
#: Dotted name of each key -> the key, in the order of the file.
FIELDS: Final[dict[str, Field]] = {field.key: field for field in _walk(inspect.type_info(ServerArgs), "", SECTIONS)}


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree
