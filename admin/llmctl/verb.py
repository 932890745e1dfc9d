"""What a verb is, as data: its arguments, how risky it is, examples. Parser, help, completions, man page and docs/llmctl.md come from it.

Nothing is imported here that costs time: every start of llmctl reads the whole table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: `read` changes nothing. `safe` changes something that clients do not notice. `disrupts` makes clients wait or refuses some. `ends` ends requests or
#: the daemon. The last two show their plan on a terminal and ask.
Risk = Literal["read", "safe", "disrupts", "ends"]
Complete = Literal["", "path", "process", "rid", "client", "operation", "crash", "key"]


@dataclass(frozen=True)
class Arg:
    """One argument: an option if its first name begins with a dash."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    kind: Literal["text", "flag", "number", "seconds", "numbers", "repeat"] = "text"
    """`number`: whole, from 0. `numbers`: several, from 1, with commas. `repeat`: may be given several times."""
    many: Literal["", "?", "*"] = ""
    """Of a positional argument: how many there may be, where that is not one."""
    default: Any = None
    const: Any = None
    """Of an option whose value may be left out: the value it has then."""
    dest: str | None = None
    one_of: str = ""
    """Of the arguments with the same name here exactly one is given."""
    complete: Complete = ""
    """What a shell completes its value to, asked when it is wanted."""
    suggest: tuple[str, ...] = ()
    """Values that a shell offers; others may be given."""

    @property
    def is_option(self) -> bool:
        return self.names[0].startswith("-")


@dataclass(frozen=True)
class Verb:
    """One verb. Its long text is the docstring of its module, llmctl.verbs.NAME, whose `run` does it."""

    line: str
    """One line of help."""
    risk: Risk = "read"
    args: tuple[Arg, ...] = ()
    examples: tuple[tuple[str, str], ...] = ()
    """(what is typed after `llmctl`, what for)."""


def arg(*names: str, help: str, **more: Any) -> Arg:
    """Short for Arg."""
    return Arg(names, help, **more)


def add(parser: argparse.ArgumentParser, args: tuple[Arg, ...]) -> None:
    """Give `parser` these arguments."""
    groups: dict[str, Any] = {}
    for entry in args:
        target: Any = parser
        if entry.one_of:
            target = groups.get(entry.one_of) or groups.setdefault(entry.one_of, parser.add_mutually_exclusive_group(required=True))
        _add(target, entry)


def _add(target: Any, entry: Arg) -> None:
    options: dict[str, Any] = {"help": entry.help.replace("%", "%%")}
    if entry.dest:
        options["dest"] = entry.dest
    if entry.kind == "flag":
        target.add_argument(*entry.names, action="store_true", **options)
        return
    if entry.kind == "repeat":
        options["action"] = "append"
    if entry.choices:
        options["choices"] = entry.choices
    if entry.many:
        options["nargs"] = entry.many
    if entry.metavar:
        options["metavar"] = entry.metavar
    converter = CONVERTERS.get(entry.kind)
    if converter is not None:
        options["type"] = converter
    if entry.const is not None:
        options["const"] = entry.const
    if entry.default is not None:
        options["default"] = entry.default
    target.add_argument(*entry.names, **options)


def seconds(text: str) -> float:
    """`2`, `500ms`, `30s`, `5min`, `1h`: above 0, up to a day."""
    for unit, factor in (("ms", 0.001), ("min", 60.0), ("h", 3600.0), ("s", 1.0), ("", 1.0)):
        number = text.removesuffix(unit) if unit else text
        if text.endswith(unit) and number.replace(".", "", 1).isdigit():
            value = float(number) * factor
            if 0 < value <= 86400:
                return value
    raise argparse.ArgumentTypeError(f"expected a time above 0 and up to a day, like 500ms, 30s or 5min, got {text!r}")


def number(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """`1,4,16`: whole numbers from 1."""
    found = tuple(number(part) for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1, got {text!r}")
    return found


CONVERTERS: dict[str, Callable[[str], Any]] = {"seconds": seconds, "number": number, "numbers": numbers}
