"""Writes the effective configuration as YAML, each value with its source; read back, it gives the same configuration."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import yaml

from llmd.config.fields import FIELDS, SECTIONS, Field
from llmd.config.load import Loaded
from llmd.config.units import format_duration, format_size
from llmd.config.values import value_of

_WORD = re.compile(r"[A-Za-z0-9/_.][\w./+@-]*")
_COMMENT_COLUMN = 48


def render(loaded: Loaded) -> str:
    """The configuration as YAML, in the order of the shipped file."""
    lines: list[str] = []
    section = ""
    for key in sorted(FIELDS, key=lambda key: "." not in key):
        field = FIELDS[key]
        for name in _entered(section, field.section):
            lines.append(f"{'  ' * name.count('.')}{name.rpartition('.')[2]}:")
        section = field.section
        text = f"{'  ' * key.count('.')}{field.leaf}: {value_text(field, value_of(loaded.args, key))}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {_one_line(loaded.origins[key])}")
    return "\n".join(lines) + "\n"


def value_text(field: Field, value: Any) -> str:
    """One value as the file writes it, with its unit, secrets left out."""
    if isinstance(value, str) and "://" in value:
        return scalar(redact_url(value))
    return scalar(value, field.unit)


def scalar(value: Any, unit: str | None = None) -> str:
    """A value in YAML's flow style."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            if unit == "s":
                return format_duration(float(value))
            return format_size(int(value)) if unit == "B" else repr(value)
        case str():
            return value if _plain(value) else _quoted(value)
        case list() | tuple():
            return f"[{', '.join(scalar(item, unit) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{scalar(name)}: {scalar(item, unit)}" for name, item in value.items()) + "}"
    raise TypeError(f"no YAML for {type(value).__name__}")


def redact_url(url: str) -> str:
    """`url` without the user and password it may hold."""
    host = urlsplit(url).netloc
    return url.replace(host, "***@" + host.rpartition("@")[2], 1) if "@" in host else url


def _plain(text: str) -> bool:
    """Whether YAML reads the bare word as this very text."""
    if not _WORD.fullmatch(text):
        return False
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[0], [])
    return not any(pattern.match(text) for _, pattern in resolvers)


def _quoted(text: str) -> str:
    """YAML's double-quoted style, everything that does not print escaped."""
    return '"' + "".join(f"\\{char}" if char in '\\"' else char if char.isprintable() else f"\\U{ord(char):08x}" for char in text) + '"'


def _entered(old: str, new: str) -> list[str]:
    """Sections that begin between a key of `old` and one of `new`, outermost first."""
    return [name for name in SECTIONS if f"{new}.".startswith(f"{name}.") and not f"{old}.".startswith(f"{name}.")]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
