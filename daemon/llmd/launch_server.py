"""`python -m llmd.launch_server`: `llmd run` for a command line that was written for SGLang.

The names are llmd.config.sglang's table. What llmd lacks is refused with status 2, never ignored.
"""

from __future__ import annotations

if __name__ == "__main__":
    from llmd.safe_path import leave_directory

    leave_directory()

import argparse
import os
import sys
from functools import partial

from llmd.cli import guarded
from llmd.config.check import arg_faults
from llmd.config.fields import FIELDS
from llmd.config.load import Loaded
from llmd.config.sglang import ALWAYS_ON, CONFIG, KEYS, TABLE, complaint, flag_value, load
from llmd.engine.foreground import launch_server as launch_server
from llmd.entry import keep_status, prepare
from llmd.errors import ConfigError, UsageError

#: The key that opens an address to everybody.
_OPEN = "http.allow_unauthenticated"


def main(argv: list[str] | None = None) -> int:
    """Entry point. Every way out is an exit status of the contract."""
    if argv is not None:
        return guarded(lambda: _run(argv))
    prepare()
    try:
        return guarded(lambda: _run(sys.argv[1:]))
    finally:
        keep_status()


def _run(argv: list[str]) -> int:
    from llmd.supervisor.main import arm, serve

    loaded, allow_failpoints = read(argv, checked=True)
    arm(os.environ, allow_failpoints=allow_failpoints)
    return serve(loaded.args, os.environ, allow_failpoints=allow_failpoints)


def read(argv: list[str], *, checked: bool = False) -> tuple[Loaded, bool]:
    """The configuration that a command line means, and whether failpoints are allowed; `checked`: also that it can be served.

    Raises UsageError, ConfigError; SystemExit for --help.
    """
    options, rest = _parser().parse_known_args(argv)
    faults = [f"{word.partition('=')[0]}: {complaint(word.partition('=')[0].lstrip('-'), dashes=True)}" for word in rest if word.startswith("--")]
    if rest and not faults:
        # What stays behind an unknown flag is its value, which is nobody's business.
        faults = [f"unexpected argument: {rest[0]!r}"]
    if faults:
        raise UsageError("\n".join(faults), hint="python -m llmd.launch_server --help lists what there is; --set KEY=VALUE sets any key")
    if bad := next((text for text in options.overrides if not text.partition("=")[1]), None):
        raise UsageError(f"--set: {bad!r} is no KEY=VALUE, like http.port=8080")
    if len(options.config) > 1 or "" in options.config:
        raise UsageError(f"--{CONFIG}: expected one file, got {' and '.join(map(repr, options.config))}")
    check = partial(arg_faults, allow_failpoints=options.allow_failpoints) if checked else None
    try:
        return load(options.flags or [], next(iter(options.config), None), options.overrides, check=check), options.allow_failpoints
    except ConfigError as error:
        if any(_OPEN in fault for fault in error.faults):
            error.hint = f"--set {_OPEN}=true serves everybody who reaches the address, as SGLang does"
        raise


class _Take(argparse.Action):
    """Notes a flag with the name it was given by."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None) -> None:
        assert option_string is not None
        value = flag_value(option_string, option_string.lstrip("-"), True if self.nargs == 0 else values)
        if value is not None:
            namespace.flags = [*(namespace.flags or ()), value]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """argparse would print and leave by itself."""
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m llmd.launch_server", description="llmd with SGLang's flag names.", allow_abbrev=False)
    parser.set_defaults(flags=None)
    parser.add_argument(f"--{CONFIG}", metavar="FILE", action="append", default=[], help="llmd's configuration file (YAML)")
    for flag in TABLE:
        names = [f"--{name}" for name in flag.names]
        text = f"{flag.key}: {FIELDS[flag.key].text}".replace("%", "%%")
        if flag.switch is None:
            parser.add_argument(*names, action=_Take, dest="flags", metavar="VALUE", help=text)
        else:
            parser.add_argument(*names, action=_Take, dest="flags", nargs=0, help=f"{text} (sets {flag.switch})")
    for name, key in KEYS.items():
        text = f"one key, as {key} would hold it; whoever lists processes can read it until llmd has started"
        parser.add_argument(f"--{name}", action=_Take, dest="flags", metavar="KEY", help=text)
    for name, why in ALWAYS_ON.items():
        parser.add_argument(f"--{name}", action=_Take, dest="flags", nargs=0, help=f"no effect: {why}")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="set any key of the configuration (llmd's own)")
    parser.add_argument("--allow-failpoints", action="store_true", help="let LLMD_FAILPOINTS provoke faults, for tests (llmd's own)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
