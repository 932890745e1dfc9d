"""Reads the YAML file into nodes that know their line and column. Never constructs objects from tags, never expands aliases.

Bounded, because a configuration may come from a template that went wrong: size, depth, one document, no anchors.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, Final, Protocol

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

MAX_BYTES: Final = 128 * 1024
MAX_DEPTH: Final = 16


class Fault(Exception):
    """One thing that is wrong; `args[0]` is the whole line."""


class _Mark(Protocol):
    line: int
    column: int


def place(file: str, node_or_mark: Node | _Mark | None) -> str:
    """`file:line:column` as editors understand it, counted from 1."""
    mark = node_or_mark.start_mark if isinstance(node_or_mark, Node) else node_or_mark
    return f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else f"{file}:1:1"


def read(file: str) -> str:
    """The file's text. Raises Fault if it cannot be read, is no file, too large or not UTF-8."""
    try:
        path = Path(file)
        if stat.S_ISDIR(path.stat().st_mode):
            raise Fault(f"{file}: is a directory, expected a YAML file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Fault(f"{file}: cannot read the configuration file: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise Fault(f"{file}: larger than {MAX_BYTES // 1024} KiB, is it a configuration file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise Fault(f"{file}:{line}:{column}: not UTF-8 (byte 0x{data[error.start]:02x})") from None


class Refused(ScalarNode):
    """In the place of a value that was an alias; the fault has been told."""


class _Composer(yaml.SafeLoader):
    """Makes nodes, none of them twice: anchors and aliases are noted as faults, so that the other faults of the file can be told with them."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self.faults: list[str] = []
        self._file = file

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None):
            self.faults.append(f"{place(self._file, event.start_mark)}: anchors and aliases are not supported, write the value out")
            if self.check_event(yaml.AliasEvent):
                self.get_event()  # type: ignore[no-untyped-call]
                return Refused("tag:yaml.org,2002:null", "", event.start_mark, event.end_mark)
            event.anchor = None
        return super().compose_node(parent, index)


def _composed(text: str, file: str, faults: list[str]) -> Node | None:
    composer = _Composer(text, file)
    try:
        return composer.get_single_node()
    finally:
        faults += composer.faults
        composer.dispose()


def compose(text: str, file: str, faults: list[str]) -> MappingNode | None:
    """The one document's mapping, or None if the file holds nothing. Adds to `faults` those that leave the rest readable; raises Fault for others."""
    try:
        _check_shape(text, file)
        root = _composed(text, file, faults)
    except yaml.MarkedYAMLError as error:
        detail = " ".join(filter(None, (error.context, error.problem)))
        raise Fault(f"{place(file, error.problem_mark or error.context_mark)}: not valid YAML: {detail}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
        raise Fault(f"{file}:{line}:{column}: not valid YAML: character #x{ord(text[error.position]):02x} is not allowed") from None
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return None
    if not isinstance(root, MappingNode):
        raise Fault(f"{place(file, root)}: expected sections like `http:`, got {'a list' if isinstance(root, yaml.SequenceNode) else 'a single value'}")
    return root


def _check_shape(text: str, file: str) -> None:
    """Refuse what would make composing costly or ambiguous, from the stream of events, before any tree is built."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise Fault(f"{place(file, event.start_mark)}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise Fault(f"{place(file, event.start_mark)}: a second YAML document begins here, expected one")
