"""The options that every verb has, as data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llmctl.verb import seconds


@dataclass(frozen=True)
class Option:
    """One of them."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    default: Any = None
    convert: Callable[[str], Any] | None = None
    dest: str | None = None

    @property
    def is_flag(self) -> bool:
        return self.default is False

    def add(self, group: Any, suppress: bool) -> None:
        """`suppress`: only what is given counts."""
        more: dict[str, Any] = {"help": self.help, "default": argparse.SUPPRESS if suppress else self.default}
        if self.dest:
            more["dest"] = self.dest
        if self.is_flag:
            group.add_argument(*self.names, action="store_true", **more)
            return
        for name, value in (("metavar", self.metavar), ("choices", self.choices or None), ("type", self.convert)):
            if value is not None:
                more[name] = value
        group.add_argument(*self.names, **more)


def _instance(text: str) -> str:
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"not an instance name: {text!r}")
    return text


GLOBAL: Final[tuple[Option, ...]] = (
    Option(("--socket",), "admin socket or run directory; else $LLMD_SOCKET, else the usual places", "PATH"),
    Option(("-i", "--instance"), "instance: run directory llmd-NAME in place of llmd, whatever $LLMD_SOCKET says", "NAME", convert=_instance),
    Option(("--url",), "the admin plane over TCP (admin.listen) in place of the socket: https://HOST:PORT", "URL"),
    Option(("--key-file",), "file with the admin key, for --url", "FILE"),
    Option(("-o", "--output"), "form of the answer; default: table", choices=("table", "wide", "json", "yaml"), default="table"),
    Option(("--timeout",), "longest wait: 2, 500ms, 30s, 5min", "TIME", convert=seconds),
    Option(("--wait",), "for what a change begins, until it is done, a day at most", default=False),
    Option(("--dry-run",), "show what a change would do, and do nothing", default=False),
    Option(("--yes",), "do not ask, also on a terminal", default=False),
    Option(("--reason",), "why, for the audit log", "TEXT"),
    Option(("--no-color",), "no colours (NO_COLOR works too)", default=False),
)
