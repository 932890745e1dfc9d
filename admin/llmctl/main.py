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
from llmctl.options import GLOBAL
from llmctl.output import Output
from llmctl.usage import Parser, surplus
from llmctl.verb import add
from llmctl.verbs import VERBS, module_of


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
    verb, before = _verb(argv)
    if before:
        raise surplus("", before)
    if verb is not None and verb not in VERBS:
        # What begins alike may differ more: `tpo` is top, `bogus` is not logs.
        close = [name for name in difflib.get_close_matches(verb, VERBS, 3, 0.6) if name[0] == verb[0]] or difflib.get_close_matches(verb, VERBS, 1, 0.7)
        hint = f"did you mean `llmctl {close[0]}`?" if close else f"there are: {', '.join(VERBS)}"
        raise CtlError(exits.USAGE, f"there is no verb {verb!r}", hint)
    options, rest = _parser(verb).parse_known_args(argv)
    if rest:
        raise surplus(verb or "", rest)
    if verb is None:
        _parser(None).print_help(sys.stderr)
        return exits.USAGE
    colour = not options.no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    client = Client.locate(options.socket, options.instance, os.environ, url=options.url, key_file=options.key_file)
    context = Context(options, client, Output(options.output, colour), VERBS[verb])
    status = int(importlib.import_module(module_of(verb)).run(context))
    sys.stdout.flush()
    return status


def _verb(argv: list[str]) -> tuple[str | None, list[str]]:
    """What argv has in the verb's place, and unknown options before it. Only that verb's module is imported, which keeps the start short."""
    parser = Parser(prog="llmctl", add_help=False, allow_abbrev=False)
    _global_options(parser, suppress=True)
    parser.add_argument("verb", nargs=argparse.REMAINDER)
    options, unknown = parser.parse_known_args(argv)
    name: str | None = next(iter(options.verb), None)
    return name, [word for word in unknown if word not in ("-h", "--help")]


def _parser(verb: str | None) -> Parser:
    codes = "\n".join(f"  {status:>3}  {meaning}" for status, meaning in MEANINGS.items())
    parser = Parser(
        prog="llmctl",
        description="Controls llmd.",
        epilog=f"exit status:\n{codes}\n\nllmctl VERB --help tells more about a verb; docs/llmctl.md and llmctl(1) about all.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _global_options(parser, suppress=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, entry in VERBS.items():
        text, end = (_help(name)) if name == verb else (None, None)
        child = verbs.add_parser(name, help=entry.line, description=text, epilog=end, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        _global_options(child, suppress=True)
        if name == verb:
            add(child, entry.args)
    return parser


def _help(name: str) -> tuple[str, str | None]:
    """A verb's long text, and its examples."""
    examples = VERBS[name].examples
    width = max((len(line) for line, _ in examples), default=0)
    rows = "\n".join(f"  llmctl {line:<{width}}  # {what}" for line, what in examples)
    return importlib.import_module(module_of(name)).__doc__ or "", f"examples:\n{rows}" if rows else None


def _global_options(parser: argparse.ArgumentParser, suppress: bool) -> None:
    """The options that may stand before or after the verb; after it, only what is given counts."""
    group = parser.add_argument_group("options of every verb")
    for option in GLOBAL:
        option.add(group, suppress)


if __name__ == "__main__":
    sys.exit(main())
