"""`llmctl`: parses the command line, runs one verb, turns every end into an exit status and a sentence on stderr."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys

from llmctl import exits
from llmctl.client import Client
from llmctl.context import Context
from llmctl.exits import MEANINGS, CtlError
from llmctl.output import Output
from llmctl.verbs import VERBS


def main(argv: list[str] | None = None) -> int:
    """Run llmctl; returns its exit status."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except CtlError as error:
        print(f"llmctl: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED


def _run(argv: list[str]) -> int:
    verb = _verb(argv)
    if verb is not None and verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 1, 0.6)
        hint = f"did you mean `llmctl {close[0]}`?" if close else f"there are: {', '.join(VERBS)}"
        raise CtlError(exits.USAGE, f"there is no verb {verb!r}", hint)
    options = _parser(verb).parse_args(argv)
    if options.verb is None:
        _parser(None).print_help(sys.stderr)
        return exits.USAGE
    colour = not options.no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    client = Client.locate(options.socket, options.instance, os.environ)
    status = int(importlib.import_module(f"llmctl.verbs.{verb}").run(Context(options, client, Output(options.output, colour))))
    sys.stdout.flush()
    return status


def _verb(argv: list[str]) -> str | None:
    """What argv has in the verb's place; only that verb's module is imported, which keeps the start short."""
    parser = argparse.ArgumentParser(prog="llmctl", add_help=False, allow_abbrev=False)
    _global_options(parser, suppress=True)
    parser.add_argument("verb", nargs="?")
    name: str | None = parser.parse_known_args(argv)[0].verb
    return name


def _parser(verb: str | None) -> argparse.ArgumentParser:
    codes = "\n".join(f"  {status:>3}  {meaning}" for status, meaning in MEANINGS.items())
    parser = argparse.ArgumentParser(
        prog="llmctl",
        description="Controls llmd.",
        epilog=f"exit status:\n{codes}\n\nllmctl VERB --help tells more about a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _global_options(parser, suppress=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, text in VERBS.items():
        module = importlib.import_module(f"llmctl.verbs.{name}") if name == verb else None
        child = verbs.add_parser(
            name, help=text, description=module.__doc__ if module else None, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        _global_options(child, suppress=True)
        if module:
            module.arguments(child)
    return parser


def _global_options(parser: argparse.ArgumentParser, suppress: bool) -> None:
    """The options that may stand before or after the verb; after it, only what is given counts."""

    def default(value: object) -> object:
        return argparse.SUPPRESS if suppress else value

    group = parser.add_argument_group("options of every verb")
    group.add_argument("--socket", metavar="PATH", default=default(None), help="admin socket or run directory; else $LLMD_SOCKET, else the usual places")
    group.add_argument("-i", "--instance", metavar="NAME", type=_instance, default=default(None), help="instance: run directory llmd-NAME in place of llmd")
    group.add_argument("-o", "--output", choices=("table", "wide", "json", "yaml"), default=default("table"), help="form of the answer; default: table")
    group.add_argument("--timeout", metavar="TIME", type=_seconds, default=default(None), help="longest wait: 2, 500ms, 30s, 5min")
    group.add_argument("--reason", metavar="TEXT", default=default(None), help="why, for the audit log")
    group.add_argument("--no-color", action="store_true", default=default(False), help="no colours (NO_COLOR works too)")


def _instance(text: str) -> str:
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"not an instance name: {text!r}")
    return text


def _seconds(text: str) -> float:
    for unit, factor in (("ms", 0.001), ("min", 60.0), ("h", 3600.0), ("s", 1.0), ("", 1.0)):
        number = text.removesuffix(unit) if unit else text
        if text.endswith(unit) and number.replace(".", "", 1).isdigit():
            seconds = float(number) * factor
            if 0 < seconds <= 86400:
                return seconds
    raise argparse.ArgumentTypeError(f"expected a time above 0 and up to a day, like 500ms, 30s or 5min, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
