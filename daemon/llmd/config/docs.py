"""Writes etc/llmd/llmd.yaml and docs/configuration.md from the fields: `python -m llmd.config.docs ROOT`.

A test compares the two files with what this module makes, so that they cannot drift.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from llmd.config.check import NOT_YET
from llmd.config.fields import FIELDS, SECTIONS, Field
from llmd.config.schema import schema
from llmd.config.show import scalar

_FILE_HEAD = """\
# llmd's configuration. Every key is here with its default, commented out: a line `#key: value` becomes active without its `#`.
#
# Precedence: flag (--set http.port=9000) > environment (LLMD_HTTP__PORT=9000) > this file > default.
# `llmd check -c FILE` finds every mistake without starting; `llmd check -c FILE --print` shows where each value comes from.
# Durations: 500ms 30s 10min 1h. Sizes: 512KiB 8MiB 1GB. A relative path is taken from this file's directory.
# In brackets, how a key may change: live, with an engine restart, or with a restart of llmd.
"""

_DOC_HEAD = """\
# Configuration

<!-- Written by `python -m llmd.config.docs .` from daemon/llmd/config/server_args.py. -->

llmd starts from one YAML file, and every key has a default: `llmd run` alone serves the embedded model on 127.0.0.1:8000.

```sh
llmd run -c /etc/llmd/llmd.yaml
llmd run -c llmd.yaml --set http.port=9000 --set supervision.restart.max=3
LLMD_HTTP__PORT=9000 llmd run
llmd check -c llmd.yaml            # every fault at once, then the plan; starts nothing
llmd check -c llmd.yaml --print    # the effective configuration, with the source of each value
```

**Precedence.** Flag > environment > file > default. An environment variable is `LLMD_`, the section, two underscores, the key:
`LLMD_SUPERVISION__RESTART__MAX=3`. Lists are written as in YAML: `LLMD_HTTP__ACCESS_LOG_EXCLUDE='[/livez, /readyz]'`. Without `-c`, the file named by
`LLMD_CONFIG` is read; without that, none.

**Units.** Durations are `500ms`, `30s`, `10min`, `1h`, `1d` and never a bare number (but `0`); sizes are `512KiB`, `8MiB`, `1GB` or bytes.

**Paths.** A relative path in the file is taken from the file's directory, one in a flag or variable from the working directory; `~` is the home directory.
`model.path` is a name if it is a single word, otherwise a path.

**Mistakes.** Unknown, misplaced, duplicate and ill-typed keys are refused, all at once, with exit status 78:

```
llmd.yaml:2:3: unknown key 'max_runing_requests' in section 'memory': did you mean 'max_running_requests'?
llmd.yaml:5:3: unknown key 'chunked_prefill_size' in section 'http': 'chunked_prefill_size' belongs under 'scheduler'
llmd.yaml:6:15: http.keep_alive: expected a duration like 30s, got 60 (a duration needs a unit: 60s, 60ms or 60min)
```

A value whose feature this version does not have is refused by name, never ignored; those keys are marked below.

**Safety.** An address other than loopback is refused unless there are API keys (`http.api_keys_file`), or `http.allow_unauthenticated: true` says that it
is meant.

*Changes*. `llmctl reload` (`systemctl reload llmd`, SIGHUP) reads all layers again and takes what has changed, all of it or nothing: `live` takes effect
without anyone noticing, `engine` restarts the engine with requests held, and if it does not come up the old values are back; a change that needs a
`restart` of llmd is refused by name. `llmctl config diff` shows what a reload would do, `llmctl config show --origin` what is in effect,
`llmctl config explain KEY` what a key means.
"""


def sample() -> str:
    """The shipped file."""
    lines = [_FILE_HEAD]
    for section in ["", *SECTIONS]:
        if section:
            _wrap(lines, SECTIONS[section], "  " * section.count("."))
            lines.append(f"{'  ' * section.count('.')}{section.rpartition('.')[2]}:")
        for field in (f for f in FIELDS.values() if f.section == section):
            indent = "  " * field.key.count(".")
            _wrap(lines, f"{text(field)} [{field.reload}]", indent)
            lines.append(f"{indent}#{field.leaf}: {scalar(field.default, field.unit)}")
        if section not in {name.rpartition(".")[0] for name in SECTIONS if "." in name} or not section:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def manual() -> str:
    """docs/configuration.md."""
    lines = [_DOC_HEAD]
    for section in [*SECTIONS, ""]:
        fields = [f for f in FIELDS.values() if f.section == section]
        title = f"`{section}`: {SECTIONS[section].rstrip('.')}" if section else "Directories"
        lines += [f"## {title}", ""] if fields else []
        for field in fields:
            lines += [f"**`{field.key}`** = `{scalar(field.default, field.unit)}`  ", f"{text(field)} *Takes {field.expects}; changes: {field.reload}.*", ""]
    return "\n".join(lines).rstrip() + "\n"


def text(field: Field) -> str:
    """A key's text, with what is missing today."""
    rule = NOT_YET.get(field.key)
    if rule is None:
        return field.text
    works = rule.works or (field.default,)
    return f"{field.text} Not there yet: {rule.what}; only {' or '.join(scalar(value, field.unit) for value in works)} is accepted."


def _wrap(lines: list[str], words: str, indent: str) -> None:
    lines += textwrap.wrap(words, 120, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def main(argv: list[str]) -> int:
    """Write the three files below the directory given."""
    root = Path(argv[0]) if argv else Path()
    files = {"etc/llmd/llmd.yaml": sample(), "etc/llmd/llmd.schema.json": schema(), "docs/configuration.md": manual()}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
