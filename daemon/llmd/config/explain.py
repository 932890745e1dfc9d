"""What a key means, without a daemon: `python -m llmd.config.explain KEY` prints JSON, `--schema` the schema of the whole file, `--keys` the names."""

from __future__ import annotations

import json
import sys
from typing import Any

from llmd.config.docs import text
from llmd.config.fields import FIELDS, SECTIONS
from llmd.config.hints import unknown_path
from llmd.config.show import scalar


def explain(key: str) -> list[dict[str, Any]]:
    """The key, or all keys of a section. Raises KeyError with a sentence that names the nearest one."""
    if key in FIELDS:
        chosen = [FIELDS[key]]
    elif key in SECTIONS:
        chosen = [field for name, field in FIELDS.items() if name.startswith(f"{key}.")]
    else:
        raise KeyError(unknown_path(key))
    return [{"key": f.key, "text": text(f), "takes": f.expects, "default": scalar(f.default, f.unit), "reload": f.reload, "environment": f.env} for f in chosen]


def main(argv: list[str]) -> int:
    """Prints to stdout; 1 with a sentence on stderr where there is no such key."""
    if argv == ["--keys"]:
        sys.stdout.writelines(f"{key}\n" for key in FIELDS)
        return 0
    if argv == ["--schema"]:
        from llmd.config.schema import schema

        sys.stdout.write(schema())
        return 0
    try:
        answer = explain(argv[0] if argv else "")
    except KeyError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 1
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
