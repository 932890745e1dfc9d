"""Shell completions, made from the verb table: fixed values stand in them, what changes (ids, keys) is asked of llmctl when it is wanted."""

from __future__ import annotations

import re
from typing import Final

from llmctl.options import GLOBAL, Option
from llmctl.verb import Arg, Verb
from llmctl.verbs import VERBS

_ROLES: Final = ("supervisor", "control", "frontend", "detokenizer", "scheduler")
#: Kind of a value -> a command that lists what there is of it. No single quotes but around sed's program.
ASKED: Final = {
    "process": f"echo {' '.join((*_ROLES, *(f'{role}-0' for role in _ROLES)))}",
    "rid": r"""llmctl requests -o json 2>/dev/null | sed -n 's/.*"request": "\([^"]*\)".*/\1/p' | sort -u""",
    "client": r"""llmctl requests -o json 2>/dev/null | sed -n 's/.*"client_id": "\([^" ]*\)".*/\1/p' | sort -u""",
    "operation": r"""llmctl audit -o json 2>/dev/null | sed -n 's/.*"operation_id": "\([^"]*\)".*/\1/p' | sort -u""",
    "crash": r"""llmctl crashes -o json 2>/dev/null | sed -n 's/.*"id": "\([^"]*\)".*/\1/p'""",
    "key": "llmctl config keys 2>/dev/null",
}


def bash() -> str:
    """Completion for bash."""
    kinds = "\n".join(f"    {kind}) {command} ;;" for kind, command in ASKED.items())
    entries: list[Arg | Option] = [*GLOBAL, *(entry for verb in VERBS.values() for entry in verb.args if entry.is_option)]
    taking = " | ".join(dict.fromkeys(name for entry in entries if _takes_value(entry) for name in entry.names))
    values = [f"    *:{' | *:'.join(option.names)}) {_bash(option)} ;;" for option in GLOBAL if _takes_value(option)]
    places: list[str] = []
    for name, verb in VERBS.items():
        values += [
            f"    {' | '.join(f'{name}:{each}' for each in entry.names)}) {_bash(entry)} ;;" for entry in verb.args if entry.is_option and _takes_value(entry)
        ]
        positional = [entry for entry in verb.args if not entry.is_option]
        places += [f"    {name}:{'*' if entry.many == '*' else at}) {_bash(entry)} ;;" for at, entry in enumerate(positional)]
    options = "\n".join(f"    {name}) options='{' '.join(_names(verb))}' ;;" for name, verb in VERBS.items())
    newline = "\n"
    return f"""\
# Written by python -m llmctl.generate; install as /usr/share/bash-completion/completions/llmctl
_llmctl_values() {{
  case "$1" in
{kinds}
  esac
}}
_llmctl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" verb='' options='' skip='' place=0 word
  COMPREPLY=()
  if [ "$current" = '=' ]; then current=''; elif [ "$previous" = '=' ]; then previous="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    if [ "$word" = '=' ]; then skip=1; continue; fi
    if [ -n "$skip" ]; then skip=''; continue; fi
    case "$word" in
      {taking}) skip=1 ;;
      -*) ;;
      *) if [ -z "$verb" ]; then verb="$word"; else place=$((place + 1)); fi ;;
    esac
  done
  case "$verb:$previous" in
{newline.join(values)}
  esac
  if [ -n "$skip" ]; then _llmctl_nospace; return; fi
  case "$verb" in
    '') COMPREPLY=($(compgen -W '{" ".join(VERBS)}' -- "$current")) ;;
{options}
  esac
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$options {" ".join(_global_names())}" -- "$current")); return ;;
  esac
  case "$verb:$place" in
{newline.join(places)}
  esac
}}
_llmctl_nospace() {{
  if [ "${{#COMPREPLY[@]}}" = 1 ] && [ "${{COMPREPLY[0]%=}}" != "${{COMPREPLY[0]}}" ]; then compopt -o nospace 2>/dev/null; fi
}}
complete -F _llmctl llmctl
"""


def zsh() -> str:
    """Completion for zsh."""
    verbs = "\n".join(f"    '{name}:{quoted(verb.line)}'" for name, verb in VERBS.items())
    kinds = "\n".join(f"    {kind}) {command} ;;" for kind, command in ASKED.items())
    body = "\n".join(f"      {name}) _arguments -s $options {' '.join(map(_zsh, verb.args))} ;;" for name, verb in VERBS.items())
    options = "\n".join(f"    {_zsh_option(option)}" for option in GLOBAL)
    return f"""\
#compdef llmctl
# Written by python -m llmctl.generate; install as _llmctl in a directory of $fpath
_llmctl_values() {{
  case "$1" in
{kinds}
  esac
}}
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
    lines += ["function __llmctl_values", "  switch $argv[1]"]
    lines += [
        line
        for kind, command in ASKED.items()
        for line in (f"    case {kind}", f"      {command.replace('echo ', 'string split ' + chr(34) + ' ' + chr(34) + ' -- ')}")
    ]
    lines += ["  end", "end"]
    for option in GLOBAL:
        lines.append(f"complete -c llmctl{_fish(option)} -d '{quoted(option.help)}'")
    for name, verb in VERBS.items():
        lines.append(f"complete -c llmctl -n __fish_use_subcommand -a {name} -d '{quoted(verb.line)}'")
        before = ""
        for entry in verb.args:
            seen = f"__fish_seen_subcommand_from {name}"
            if entry.is_option:
                lines.append(f"complete -c llmctl -n '{seen}'{_fish(entry)} -d '{quoted(entry.help)}'")
                continue
            own = f"; and not __fish_seen_subcommand_from {' '.join(entry.choices)}" if entry.choices else ""
            if words := _fish_words(entry):
                lines.append(f"complete -c llmctl -n '{seen}{before}{own}'" + (" -F" if words == "path" else f" -a '{words}'"))
            before = f"; and __fish_seen_subcommand_from {' '.join(entry.choices)}" if entry.choices else before
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Safe within single quotes, brackets and colons of the shells."""
    return re.sub(r"[\[\]:`']", " ", text).replace("  ", " ").strip()


def _takes_value(entry: Arg | Option) -> bool:
    """Whether the next word is its value, always."""
    return not entry.is_flag if isinstance(entry, Option) else entry.kind != "flag" and not entry.many


def _kind(entry: Arg | Option) -> str:
    if isinstance(entry, Option):
        return "path" if entry.metavar in ("PATH", "FILE") else ""
    return entry.complete


def _fixed(entry: Arg | Option) -> tuple[str, ...]:
    return entry.choices or (entry.suggest if isinstance(entry, Arg) else ())


def _names(verb: Verb) -> list[str]:
    return [name for entry in verb.args if entry.is_option for name in entry.names]


def _global_names() -> list[str]:
    return [name for option in GLOBAL for name in option.names if name.startswith("--")]


def _bash(entry: Arg | Option) -> str:
    """The command that completes its value."""
    kind, fixed = _kind(entry), _fixed(entry)
    if kind == "path":
        return 'COMPREPLY=($(compgen -f -- "$current"))'
    words = f"'{' '.join(fixed)}'" if fixed else f'"$(_llmctl_values {kind})"' if kind else ""
    return f'COMPREPLY=($(compgen -W {words} -- "$current"))' if words else ":"


def _zsh_action(entry: Arg | Option) -> str:
    kind, fixed = _kind(entry), _fixed(entry)
    if fixed:
        return f"({' '.join(fixed)})"
    return "_files" if kind == "path" else f"{{compadd -- $(_llmctl_values {kind})}}" if kind else ""


def _zsh(entry: Arg) -> str:
    if not entry.is_option:
        return f"'{'*' if entry.many == '*' else ''}:{entry.names[0]}:{_zsh_action(entry)}'"
    value = "" if entry.kind == "flag" else f":{entry.metavar or 'value'}:{_zsh_action(entry)}"
    return f"'{entry.names[-1]}{'=' * (bool(value) and not entry.many)}[{quoted(entry.help)}]{value}'"


def _zsh_option(option: Option) -> str:
    value = "" if option.is_flag else f":{option.metavar or 'value'}:{_zsh_action(option)}"
    return f"'{option.names[-1]}{'=' * bool(value)}[{quoted(option.help)}]{value}'"


def _fish_words(entry: Arg | Option) -> str:
    kind, fixed = _kind(entry), _fixed(entry)
    return " ".join(fixed) if fixed else "path" if kind == "path" else f"(__llmctl_values {kind})" if kind else ""


def _fish(entry: Arg | Option) -> str:
    flags = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in entry.names)
    if not _takes_value(entry):
        return flags
    words = _fish_words(entry)
    if words == "path":
        return f"{flags} -r -F"
    return f"{flags} -x -a '{words}'" if words else f"{flags} -x"
