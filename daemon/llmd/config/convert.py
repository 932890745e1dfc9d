"""Turns one YAML node into the value of one key, as that key's type says. Every complaint says what was expected."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

import msgspec
from msgspec import inspect
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from llmd.config.fields import Field, bare
from llmd.config.units import parse_duration, parse_size

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge", "seq", "map"))
#: As YAML 1.1 writes numbers, with ASCII digits and single underscores between them.
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_INT = re.compile(f"[-+]?(0|(?!0){_DIGITS})")
_FLOAT = re.compile(rf"[-+]?({_DIGITS})?\.?{_DIGITS}([eE][-+]?[0-9]+)?|[-+]?{_DIGITS}\.")
#: A model path that is a name: one word, perhaps with a scheme like `hf:`.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.gguf)|[a-z]+:.*")


class Mismatch(Exception):
    """The node is not what the type wants; `args[0]` may say more than the type's own words."""


def to_value(field: Field, node: Node, base: str) -> Any:
    """The typed value of `field` at `node`; relative paths are taken from the directory `base`. Raises ValueError with the complaint."""
    try:
        value = _absolute(field, _builtin(node, field.type, field.unit), base)
        return msgspec.convert(value, field.annotation)
    except Mismatch as error:
        why = f" ({error.args[0]})" if error.args else ""
        raise ValueError(f"{field.key}: expected {field.expects}, got {show(node)}{why}") from None
    except msgspec.ValidationError:
        raise ValueError(f"{field.key}: expected {field.expects}, got {show(node)}") from None


def here() -> str:
    """The working directory; empty where it has been deleted, which is no reason to fail as long as nothing is sought there."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def show(node: Node) -> str:
    """What was written, shortened."""
    if isinstance(node, ScalarNode):
        if node.tag == _TAG + "null":
            return "nothing" if not node.value else "null"
        text = node.value if len(node.value) <= 60 else node.value[:57] + "..."
        return repr(text) if node.style or node.tag == _TAG + "str" else text
    return "a mapping" if isinstance(node, MappingNode) else "a list"


def _builtin(node: Node, kind: inspect.Type, unit: str | None) -> Any:
    if node.tag not in _PLAIN:
        raise Mismatch(f"the tag {node.tag} is not allowed")
    match bare(kind):
        case inspect.UnionType(types=types):
            return _first(node, types, unit)
        case inspect.TupleType(item_types=items):
            if not isinstance(node, SequenceNode) or len(node.value) != len(items):
                raise Mismatch
            return tuple(_builtin(child, item, unit) for child, item in zip(node.value, items, strict=True))
        case inspect.VarTupleType(item_type=item):
            if not isinstance(node, SequenceNode):
                raise Mismatch
            return tuple(_builtin(child, item, unit) for child in node.value)
        case inspect.DictType(value_type=value):
            return _mapping(node, value, unit)
        case scalar:
            if not isinstance(node, ScalarNode):
                raise Mismatch
            return _scalar(node, scalar, unit)


def _first(node: Node, types: tuple[inspect.Type, ...], unit: str | None) -> Any:
    """The first member of a union that fits; the most telling complaint if none does."""
    why: tuple[str, ...] = ()
    for kind in types:
        try:
            return _builtin(node, kind, unit)
        except Mismatch as error:
            why = why or error.args
    raise Mismatch(*why)


def _mapping(node: Node, value: inspect.Type, unit: str | None) -> dict[str, Any]:
    if not isinstance(node, MappingNode):
        raise Mismatch
    found: dict[str, Any] = {}
    for key, child in node.value:
        if not isinstance(key, ScalarNode) or not key.value or key.value in found:
            raise Mismatch(f"{show(key)} at line {key.start_mark.line + 1} is no name, or is there twice")
        found[key.value] = _builtin(child, value, unit)
    return found


def _scalar(node: ScalarNode, kind: inspect.Type, unit: str | None) -> Any:
    text, plain = node.value, node.style is None
    match kind:
        case inspect.NoneType():
            if node.tag == _TAG + "null":
                return None
        case inspect.BoolType():
            if plain and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if node.tag == _TAG + "bool":
                raise Mismatch("write true or false")
        case inspect.LiteralType(values=values):
            if text in values:
                return text
        case inspect.StrType():
            if node.tag in (_TAG + "str", _TAG + "timestamp"):
                if not text.isprintable() and any(char < " " or "\ud800" <= char <= "\udfff" for char in text):
                    raise Mismatch("control characters or bytes that are not UTF-8")
                return text
            if node.tag != _TAG + "null":
                raise Mismatch("put it in quotes")
        case inspect.IntType() | inspect.FloatType():
            return _number(text, plain, kind, unit)
    raise Mismatch


def _number(text: str, plain: bool, kind: inspect.IntType | inspect.FloatType, unit: str | None) -> int | float:
    try:
        if unit == "s":
            return parse_duration(text)
        if unit == "B":
            return parse_size(text)
    except ValueError as error:
        raise Mismatch(str(error)) from None
    if not plain:
        raise Mismatch("a number is written without quotes")
    if isinstance(kind, inspect.IntType):
        if _INT.fullmatch(text) is None or len(text) > 18:
            raise Mismatch
        return int(text)
    number = float(text) if _FLOAT.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise Mismatch
    return number


def _absolute(field: Field, value: Any, base: str) -> Any:
    """`value` with each path made absolute."""
    if not field.path or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_absolute(field, item, base) for item in value)
    if isinstance(value, dict):
        return {name: _absolute(field, item, base) for name, item in value.items()}
    if not value or (field.path == "or_name" and _NAME.fullmatch(value)):
        return value
    path = os.path.join(base, os.path.expanduser(value))
    if not os.path.isabs(path):
        raise Mismatch("the working directory is gone: write the path from / on")
    return os.path.normpath(path)
