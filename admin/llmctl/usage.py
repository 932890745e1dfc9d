"""Usage errors in words: what was wrong, what was probably meant, and how the verb is written."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Final, NoReturn

from llmctl import exits
from llmctl.exits import CtlError
from llmctl.options import GLOBAL
from llmctl.verb import Arg
from llmctl.verbs import VERBS

_CHOICE: Final = re.compile(r"argument (?P<name>.+?): invalid choice: '(?P<given>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)
_MISSING: Final = re.compile(r"the following arguments are required: (?P<names>.+)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are ours. Raises CtlError (2)."""

    def error(self, message: str) -> NoReturn:
        raise fault(self.prog.partition(" ")[2], message)


def fault(verb: str, message: str) -> CtlError:
    """The error for argparse's `message` about `verb`; empty: about what comes before it."""
    who = f"{verb}: " if verb else ""
    if match := _CHOICE.fullmatch(message):
        choices = re.findall(r"'([^']*)'|([\w-]+)", match["choices"])
        names = [quoted or bare for quoted, bare in choices]
        what = "" if not match["name"].startswith("-") else f"{match['name'].rpartition('/')[2]}: "
        return _error(verb, f"{who}{what}{match['given']!r} is none of {', '.join(names)}", _nearest(match["given"], names))
    if match := _MISSING.fullmatch(message):
        return _error(verb, f"{who}{match['names'].upper()} is missing")
    return _error(verb, f"{who}{message.removeprefix('argument ')}")


def surplus(verb: str, words: list[str]) -> CtlError:
    """The error for words that nothing takes."""
    first, who = words[0], f"{verb}: " if verb else ""
    if not first.startswith("-") or first == "-":
        return _error(verb, f"{who}{first!r} is more than it takes")
    name = first.partition("=")[0]
    bare = name.lstrip("-")
    for option in GLOBAL:
        if bare in option.choices:  # --json
            return _error(verb, f"{who}there is no option {name}", f"did you mean `{option.names[0]} {bare}`?")
    names = [each for option in GLOBAL for each in option.names] + [each for entry in (VERBS[verb].args if verb in VERBS else ()) for each in entry.names]
    known = [each for each in names if each.startswith("-")]
    return _error(verb, f"{who}there is no option {name}", _nearest(name, known))


def usage(verb: str) -> str:
    """`llmctl restart [--no-wait] [--all]`."""
    return " ".join(["llmctl", verb, *map(_word, VERBS[verb].args)])


def _error(verb: str, message: str, meant: str = "") -> CtlError:
    shown = f"usage: {usage(verb)}\n  llmctl {verb} --help says more" if verb in VERBS else "llmctl --help lists verbs and options"
    return CtlError(exits.USAGE, message, f"{meant}\n  {shown}" if meant else shown)


def _nearest(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, 1, 0.6)
    return f"did you mean `{close[0]}`?" if close else ""


def _word(entry: Arg) -> str:
    value = "|".join(entry.choices) or entry.metavar or entry.names[-1].lstrip("-").upper()
    if not entry.is_option:
        return f"[{value}]{'...' * (entry.many == '*')}" if entry.many or entry.one_of else value
    takes = "" if entry.kind == "flag" else f" [{value}]" if entry.many else f" {value}"
    return f"[{entry.names[-1]}{takes}]"
