"""Makes a `ServerArgs` from flags, environment, file and defaults, and remembers where each value came from.

Flag (`--set key=value`) > environment (`LLMD_<SECTION>__<KEY>`) > file > default. All faults are found before any is
reported: one ConfigError, one line each, `file:line:column: message` with the nearest key that exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct
from yaml.nodes import MappingNode, Node, ScalarNode

from llmd.config import yaml_file
from llmd.config.convert import here, show, to_value
from llmd.config.fields import FIELDS, SECTIONS, nest
from llmd.config.hints import nearest_env, unknown_key, unknown_path
from llmd.config.server_args import ServerArgs
from llmd.config.yaml_file import Fault, place
from llmd.errors import ConfigError
from llmd.failpoints import ENV as ENV_FAILPOINTS

ENV_CONFIG: Final = "LLMD_CONFIG"
#: A hint for whoever has written a key wrong.
DESCRIBED: Final = "every key is described in docs/configuration.md"
#: Variables with a meaning of their own; the last three are what the supervisor tells its children (llmd.plan.context).
RESERVED: Final = frozenset({ENV_CONFIG, ENV_FAILPOINTS, "LLMD_SOCKET", "LLMD_ISA", "LLMD_INCARNATION", "LLMD_EPOCH", "LLMD_SUPERVISOR_PID"})
#: What Kubernetes sets in every pod beside a service named `llmd`, and what tests use.
_PLACE = re.compile(r"(?!--set |environment )[^\n]*?:(?P<line>\d+):(?P<column>\d+): ")
_FOREIGN = re.compile(r"LLMD_(PORT(_\d+_(TCP|UDP).*)?|SERVICE_(HOST|PORT.*)|TEST_.*)")


class Loaded(Struct, frozen=True):
    """The configuration and the source of each of its values."""

    args: ServerArgs
    origins: dict[str, str]
    """Dotted key -> `default`, `file PATH:LINE`, `environment NAME` or `flag NAME`."""
    config_file: str | None = None
    """The file that was read, absolute."""
    places: dict[str, str] = {}
    """Dotted key -> where its value was written, as faults name it; only of values that were written."""


#: More faults that values have, each with its key; reported together with what the loader finds.
Check = Callable[[ServerArgs], list[tuple[str, str]]]


class FlagValue(Struct, frozen=True):
    """One flag of a command line, or one keyword argument."""

    name: str
    """As it was written, for messages."""
    key: str
    text: str


class _Values:
    """What the layers say so far: later layers overwrite earlier ones."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.faults: list[str] = []
        self.hint = ""

    def take(self, key: str, node: Node, base: str, where: str, origin: str) -> None:
        try:
            self.values[key] = to_value(FIELDS[key], node, base)
            self.origins[key], self.places[key] = origin, where
        except ValueError as error:
            self.faults.append(located(where, key, str(error)))


def located(where: str, key: str, fault: str) -> str:
    """`WHERE: fault`; the key, with which `fault` begins, once."""
    return f"{where}: {fault.removeprefix(f'{key}: ')}" if where.endswith(f" {key}") else f"{where}: {fault}"


def load_config(
    config_file: str | None, overrides: list[str], environ: Mapping[str, str], *, flags: tuple[FlagValue, ...] = (), check: Check | None = None
) -> Loaded:
    """Read all layers. `config_file` None: the one named by LLMD_CONFIG, if any. Raises ConfigError with every fault, those that `check` finds too."""
    found = _Values()
    name = config_file or environ.get(ENV_CONFIG) or None
    if name is not None:
        _from_file(found, name)
    _from_environment(found, environ)
    for override in overrides:
        _from_override(found, override)
    for flag in flags:
        _from_text(found, flag.key, flag.text, flag.name, f"flag {flag.name}", literal=True)
    args = msgspec.convert(nest(found.values), ServerArgs)  # of the values that are right, so that all faults of all are told at once
    for key, fault in check(args) if check is not None else ():
        found.faults.append(located(found.places[key], key, fault) if key in found.places else fault)
    origins = {key: found.origins.get(key, "default") for key in FIELDS}
    loaded = Loaded(args, origins, _full(name) if name else None, found.places)
    if found.faults:
        error = ConfigError(in_order(found.faults), hint=found.hint or f"{DESCRIBED}; `llmd check -c FILE` checks without starting")
        error.readable = loaded
        raise error
    return loaded


def placed(faults: list[str], places: Mapping[str, str]) -> list[str]:
    """Faults that begin with a key, with the place where its value was written."""
    keys = ((fault.partition(":")[0], fault) for fault in faults)
    return [located(places[key], key, fault) if key in places else fault for key, fault in keys]


def in_order(faults: list[str]) -> list[str]:
    """In the order of the file; those without a line after them, as they came."""

    def position(fault: str) -> tuple[int, int, int]:
        match = _PLACE.match(fault)
        return (0, int(match["line"]), int(match["column"])) if match else (1, 0, 0)

    return sorted(faults, key=position)


def _from_file(found: _Values, file: str) -> None:
    try:
        root = yaml_file.compose(yaml_file.read(file), file, found.faults)
    except Fault as fault:
        found.faults.append(str(fault))
        if not os.path.exists(file):
            found.hint = "every key has a default, so llmd also runs without a file; etc/llmd/llmd.yaml of the sources is one to copy"
        return
    if root is not None:
        _section(found, root, "", file, os.path.dirname(_full(file)))


def _full(file: str) -> str:
    return os.path.normpath(os.path.join(here(), file))


def _section(found: _Values, node: MappingNode, section: str, file: str, base: str) -> None:
    """Take the keys of one mapping; goes on after each fault."""
    seen: dict[str, Node] = {}
    for key_node, value in node.value:
        where = place(file, key_node)
        if not isinstance(key_node, ScalarNode):
            found.faults.append(f"{where}: expected a key, got {show(key_node)}")
            continue
        name = key_node.value
        key = f"{section}.{name}" if section else name
        if name in seen:
            found.faults.append(f"{where}: duplicate key {key!r}, first at line {seen[name].start_mark.line + 1}")
            continue
        seen[name] = key_node
        if isinstance(value, yaml_file.Refused):
            continue
        if key in FIELDS:
            found.take(key, value, base, place(file, value), f"file {_full(file)}:{key_node.start_mark.line + 1}")
            continue
        if key not in SECTIONS:
            message, meant = unknown_key(section, name)
            found.faults.append(f"{where}: {message}")
            if meant is None:
                continue
            key = meant
        _subsection(found, value, key, file, base)


def _subsection(found: _Values, value: Node, key: str, file: str, base: str) -> None:
    if isinstance(value, MappingNode):
        _section(found, value, key, file, base)
    elif value.tag != "tag:yaml.org,2002:null":
        found.faults.append(f"{place(file, value)}: {key} is a section, expected keys below it, got {show(value)}")


def _from_environment(found: _Values, environ: Mapping[str, str]) -> None:
    by_env = {field.env: field.key for field in FIELDS.values()}
    for name in filter(is_meant, sorted(environ)):
        where = f"environment {name}"
        if name in by_env:
            _from_text(found, by_env[name], environ[name], where, where)
        else:
            found.faults.append(f"{where}: unknown variable{nearest_env(name, by_env)}")


def is_meant(name: str) -> bool:
    """Whether a variable of this name is for the configuration, be it one that there is not."""
    return name.startswith("LLMD_") and name not in RESERVED and not _FOREIGN.fullmatch(name)


def _from_override(found: _Values, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    where = f"--set {key}"
    if not equals:
        known = "" if key in FIELDS else f"; {unknown_path(key)}" if key else ""
        found.faults.append(f"{where}: expected KEY=VALUE, like --set {key if key in FIELDS else 'http.port'}=...{known}")
    elif key in FIELDS:
        _from_text(found, key, text, where, "flag --set")
    elif key in SECTIONS:
        found.faults.append(f"{where}: {key} is a section, set its keys one by one")
    else:
        found.faults.append(f"{where}: {unknown_path(key)}")


def _from_text(found: _Values, key: str, text: str, where: str, origin: str, *, literal: bool = False) -> None:
    """Take a value from a flag or the environment: text for text, otherwise a YAML value such as `[a, b]`. `literal`: `null` is a text, too."""
    try:
        found.take(key, _node(key, text, literal), here(), where, origin)
    except Fault as fault:
        found.faults.append(f"{where}: {fault}")


def _node(key: str, text: str, literal: bool) -> Node:
    null = text in ("", "~", "null", "Null", "NULL")
    if FIELDS[key].is_text and not (null and not literal and FIELDS[key].expects.endswith("null")):
        return ScalarNode("tag:yaml.org,2002:str", text)
    try:
        faults: list[str] = []
        root = yaml_file.compose(f"value: {text}", "", faults)
        if faults:
            raise Fault(faults[0])
    except Fault as fault:
        raise Fault(f"cannot read {text[:60]!r}: {str(fault).partition(': ')[2]}") from None
    if root is None or len(root.value) != 1:
        raise Fault(f"cannot read {text[:60]!r} as one value")
    node = root.value[0][1]
    assert isinstance(node, Node)
    return node
