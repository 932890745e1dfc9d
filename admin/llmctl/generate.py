"""Writes what follows from the verb table: docs/llmctl.md, the man page, the completions. `python -m llmctl.generate ROOT`.

A test compares the files with what this module makes, so that they cannot drift.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from llmctl import completions
from llmctl.exits import MEANINGS
from llmctl.options import GLOBAL, Option
from llmctl.verb import Arg
from llmctl.verbs import VERBS, module_of

_RISKS = {
    "read": "",
    "safe": "Changes something that clients do not notice.",
    "disrupts": "Makes clients wait, or refuses some: on a terminal it shows its plan and asks (`--yes` does not).",
    "ends": "Ends requests or the daemon: on a terminal it shows its plan and asks (`--yes` does not).",
}

_DOC_HEAD = """\
# llmctl

<!-- Written by `python -m llmctl.generate .` from the verbs of admin/llmctl. -->

`llmctl VERB` asks or tells the running llmd. It finds the daemon at `--socket`, else `$LLMD_SOCKET`; else at `/run/llmd`, `$XDG_RUNTIME_DIR/llmd`,
`llmd-UID` in the temporary directory, in this order; `-i NAME` looks for `llmd-NAME` there, whatever `$LLMD_SOCKET` says. An explicit place is the only one
looked at. Data goes to stdout, all else to stderr.

A risky change asks only where somebody can answer: with a terminal at stdin and stderr. In scripts, units and pipes nothing is asked, and it is done;
`--dry-run` shows the plan there.

Whether a change was carried out whose answer never came is not known: that is exit status 69, and `llmctl audit` and `llmctl status` tell.
"""


def manual() -> str:
    """docs/llmctl.md."""
    lines = [_DOC_HEAD, "| exit status | |", "|---|---|", *(f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()), ""]
    lines += ["## Options of every verb", "", *(f"- `{_usage(option)}`: {option.help}" for option in GLOBAL), ""]
    for name, verb in VERBS.items():
        lines += [f"## llmctl {name}", "", _text(name), ""]
        if _RISKS[verb.risk]:
            lines += [_RISKS[verb.risk], ""]
        lines += [f"- `{_argument(entry)}`: {entry.help}" for entry in verb.args]
        lines += [""] * bool(verb.args)
        if verb.examples:
            width = max(len(line) for line, _ in verb.examples)
            lines += ["```sh", *(f"llmctl {line:<{width}}  # {what}" for line, what in verb.examples), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def man_page() -> str:
    """llmctl(1)."""
    lines = [
        '.\\" Written by python -m llmctl.generate', ".TH LLMCTL 1", ".SH NAME", "llmctl \\- control llmd", ".SH SYNOPSIS", ".B llmctl",
        "[\\fIOPTION\\fR]... \\fIVERB\\fR [\\fIARGUMENT\\fR]...", ".SH DESCRIPTION", _roff(_DOC_HEAD.partition("-->")[2].strip()), ".SH OPTIONS",
    ]  # fmt: skip
    for option in GLOBAL:
        lines += [".TP", f"\\fB{_roff(_usage(option))}\\fR", _roff(option.help)]
    lines.append(".SH VERBS")
    for name, verb in VERBS.items():
        lines += [f".SS {_roff(name)}", _roff(_text(name))]
        if _RISKS[verb.risk]:
            lines += [".PP", _roff(_RISKS[verb.risk])]
        for entry in verb.args:
            lines += [".TP", f"\\fB{_roff(_argument(entry))}\\fR", _roff(entry.help)]
    lines.append(".SH EXIT STATUS")
    for status, meaning in MEANINGS.items():
        lines += [".TP", str(status), _roff(meaning)]
    return "\n".join([*lines, ".SH SEE ALSO", ".BR llmd (1)"]) + "\n"


FILES = {
    "docs/llmctl.md": manual,
    "packaging/man/llmctl.1": man_page,
    "packaging/completions/llmctl.bash": completions.bash,
    "packaging/completions/_llmctl": completions.zsh,
    "packaging/completions/llmctl.fish": completions.fish,
}


def _text(name: str) -> str:
    return (importlib.import_module(module_of(name)).__doc__ or "").strip()


def _usage(option: Option) -> str:
    value = "|".join(option.choices) or option.metavar
    return ", ".join(option.names) + (f" {value}" if value and not option.is_flag else "")


def _argument(entry: Arg) -> str:
    value = "|".join(entry.choices) or entry.metavar or ("" if entry.kind == "flag" else entry.names[0].strip("-").upper())
    if not entry.is_option:
        return f"[{value}]" if entry.many else value
    shown = f"[{value}]" if entry.many else value
    return ", ".join(entry.names) + (f" {shown}" if shown else "")


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return "\n.PP\n".join("\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in part.splitlines()) for part in escaped.split("\n\n"))


def main(argv: list[str]) -> int:
    """Write the files below the directory given."""
    root = Path(argv[0]) if argv else Path()
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
