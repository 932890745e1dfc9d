"""Writes what follows from the verb table: docs/llmctl.md, the man page, the completions. `python -m llmctl.generate ROOT`.

A test compares the files with what this module makes, so that they cannot drift.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from llmctl.exits import MEANINGS
from llmctl.options import GLOBAL, Option
from llmctl.verb import Arg, Verb
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
`llmd-UID` in the temporary directory, in this order; `-i NAME` looks for `llmd-NAME`. An explicit place is the only one looked at. Data goes to stdout,
all else to stderr.

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


def bash() -> str:
    """Completion for bash."""
    cases = "\n".join(f"    {name}) words='{' '.join(_words(verb))}' ;;" for name, verb in VERBS.items())
    choices = "\n".join(f"    {' | '.join(names)}) COMPREPLY=($(compgen -W '{' '.join(values)}' -- \"$current\")); return ;;" for names, values in _valued())
    paths = " | ".join(_path_options())
    return f"""\
# Written by python -m llmctl.generate; install as /usr/share/bash-completion/completions/llmctl
_llmctl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" verb='' words='' word
  COMPREPLY=()
  case "$previous" in
{choices}
    {paths}) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in {" | ".join(VERBS)}) verb="$word"; break ;; esac
  done
  case "$verb" in
    '') words='{" ".join(VERBS)}' ;;
{cases}
  esac
  case "$verb:$current" in
    abort:[!-]*|abort:) words="$words $(llmctl requests -o json 2>/dev/null | sed -n 's/.*"request": "\\([^"]*\\)".*/\\1/p')" ;;
    reload:*/*) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  COMPREPLY=($(compgen -W "$words {" ".join(_global_words())}" -- "$current"))
}}
complete -F _llmctl llmctl
"""


def zsh() -> str:
    """Completion for zsh."""
    verbs = "\n".join(f"    '{name}:{_quoted(verb.line)}'" for name, verb in VERBS.items())
    cases = []
    for name, verb in VERBS.items():
        entries = [_zsh(entry) for entry in verb.args]
        cases.append(f"      {name}) _arguments -s $options {' '.join(entries)} ;;")
    options = "\n".join(f"    {_zsh_option(option)}" for option in GLOBAL)
    body = "\n".join(cases)
    return f"""\
#compdef llmctl
# Written by python -m llmctl.generate; install as _llmctl in a directory of $fpath
_llmctl() {{
  local -a verbs options
  verbs=(
{verbs}
  )
  options=(
{options}
  )
  _arguments -C -s $options '1: :->verb' '*:: :->rest'
  case "$state" in
    verb) _describe verb verbs ;;
    rest)
      case "$words[1]" in
{body}
      esac ;;
  esac
}}
_llmctl "$@"
"""


def fish() -> str:
    """Completion for fish."""
    lines = ["# Written by python -m llmctl.generate; install as ~/.config/fish/completions/llmctl.fish", "complete -c llmctl -f"]
    for option in GLOBAL:
        lines.append(f"complete -c llmctl{_fish(option.names, option.choices, option.metavar, not option.is_flag)} -d '{_quoted(option.help)}'")
    for name, verb in VERBS.items():
        lines.append(f"complete -c llmctl -n __fish_use_subcommand -a {name} -d '{_quoted(verb.line)}'")
        for entry in verb.args:
            where = f"complete -c llmctl -n '__fish_seen_subcommand_from {name}'"
            if entry.is_option:
                lines.append(f"{where}{_fish(entry.names, entry.choices, entry.metavar, entry.kind != 'flag')} -d '{_quoted(entry.help)}'")
            elif entry.choices:
                lines.append(f"{where} -a '{' '.join(entry.choices)}'")
    return "\n".join(lines) + "\n"


FILES = {
    "docs/llmctl.md": manual,
    "packaging/man/llmctl.1": man_page,
    "packaging/completions/llmctl.bash": bash,
    "packaging/completions/_llmctl": zsh,
    "packaging/completions/llmctl.fish": fish,
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


def _words(verb: Verb) -> list[str]:
    found: list[str] = []
    for entry in verb.args:
        found += entry.names if entry.is_option else entry.choices
    return found


def _global_words() -> list[str]:
    return [name for option in GLOBAL for name in option.names if name.startswith("--")]


def _valued() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Options with a fixed set of values, and these."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {option.names: option.choices for option in GLOBAL if option.choices}
    for verb in VERBS.values():
        found |= {entry.names: entry.choices for entry in verb.args if entry.is_option and entry.choices}
    return list(found.items())


def _path_options() -> list[str]:
    found = [name for option in GLOBAL if option.metavar in ("PATH", "FILE") for name in option.names]
    found += [name for verb in VERBS.values() for entry in verb.args if entry.is_option and entry.complete == "path" for name in entry.names]
    return list(dict.fromkeys(found))


def _zsh(entry: Arg) -> str:
    what = f"({' '.join(entry.choices)})" if entry.choices else "_files" if entry.complete == "path" else ""
    if not entry.is_option:
        return f"'{'*' if entry.many == '*' else ''}:{entry.names[0]}:{what}'"
    value = "" if entry.kind == "flag" else f":{entry.metavar or 'value'}:{what}"
    return f"'{entry.names[-1]}[{_quoted(entry.help)}]{value}'"


def _zsh_option(option: Option) -> str:
    what = f"({' '.join(option.choices)})" if option.choices else "_files" if option.metavar in ("PATH", "FILE") else ""
    value = "" if option.is_flag else f":{option.metavar or 'value'}:{what}"
    return f"'{option.names[-1]}[{_quoted(option.help)}]{value}'"


def _fish(names: tuple[str, ...], choices: tuple[str, ...], metavar: str | None, takes: bool) -> str:
    flags = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in names)
    if not takes:
        return flags
    if choices:
        return f"{flags} -x -a '{' '.join(choices)}'"
    return f"{flags} -r -F" if metavar in ("PATH", "FILE") else f"{flags} -x"


def _quoted(text: str) -> str:
    """Safe within single quotes, brackets and colons of the shells."""
    return re.sub(r"[\[\]:`']", " ", text).replace("  ", " ").strip()


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
