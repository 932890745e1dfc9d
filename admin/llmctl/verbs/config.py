"""The configuration that is in effect, what a reload would change, and what the keys mean.

`show [KEY|SECTION]`: the values that differ from the defaults, or `--all`; `--origin` adds where each was written. `diff`: the file as it is now against what
runs. `explain KEY|SECTION`: what it means, what it takes, how it may change. `keys`: the names of all keys. `schema`: the JSON schema of the file, for
editors. `reload`: take the changed file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import plan_lines
from llmctl.verbs import reload


def run(context: Context) -> int:
    options = context.options
    if options.key and options.what not in ("show", "explain"):
        raise CtlError(exits.USAGE, f"config {options.what} takes no KEY")
    match options.what:
        case "diff":
            return _diff(context)
        case "explain":
            return _explain(context)
        case "schema" | "keys":
            context.out.line(_daemons_words(f"--{options.what}").rstrip())
            return exits.OK
        case "reload":
            return reload.configuration(context)
        case _:
            return _show(context)


def _show(context: Context) -> int:
    options = context.options
    answer = context.get("/v1/config")
    key = options.key
    rows = [row for row in answer["values"] if key is None or row["key"] == key or row["key"].startswith(f"{key}.")]
    if not rows:
        raise CtlError(exits.BAD_INPUT, f"there is no key {key!r}", f"llmctl config explain {key}")
    if key is None and not options.all and context.out.is_table:
        rows = [row for row in rows if row["origin"] != "default" or row["resolved"]]
    if not context.out.is_table:
        context.out.data({**answer, "values": rows})
        return exits.OK
    origins = options.origin or context.out.is_wide
    columns = ["KEY", "VALUE", *(["ORIGIN", "CHANGES"] if origins else [])]
    context.out.table(columns, [[row["key"], row["text"], *([_origin(row), row["reload"]] if origins else [])] for row in rows])
    if key is None and not options.all:
        context.note("everything else has its default; --all shows that too")
    return exits.OK


def _origin(row: dict[str, Any]) -> str:
    return f"{row['origin']}, resolved" if row["resolved"] else str(row["origin"])


def _diff(context: Context) -> int:
    """What `reload --dry-run` says, and exit status 0 whether or not there is a difference."""
    try:
        reply = context.client.post("/v1/config/reload", {"dry_run": True}, context.read_timeout() + 10)
    except CtlError as error:
        if error.data and not context.out.is_table:
            context.out.data(error.data)
        raise
    plan = reply.get("plan") or {}
    if not context.out.is_table:
        context.out.data(plan.get("changes") or [])
    elif plan.get("changes"):
        for line in plan_lines(plan):
            context.out.line(line)
    else:
        context.out.line("nothing has changed")
    return exits.OK


def _explain(context: Context) -> int:
    key = context.options.key
    if not key:
        raise CtlError(exits.USAGE, "config explain needs a KEY or SECTION", "llmctl config explain http.port; llmctl config keys lists all")
    entries = json.loads(_daemons_words(key))
    for entry in entries:
        entry["value"] = entry["origin"] = None
    try:
        now = {row["key"]: row for row in context.get("/v1/config")["values"]}
        for entry in entries:
            row = now.get(entry["key"]) or {}
            entry["value"], entry["origin"] = row.get("text"), row.get("origin")
    except CtlError as error:
        if error.status not in (exits.NOT_RUNNING, exits.NOT_ANSWERING):
            raise
    if not context.out.is_table:
        context.out.data(entries)
        return exits.OK
    for number, entry in enumerate(entries):
        context.out.line("\n" * bool(number) + context.out.paint(entry["key"], "bold"))
        context.out.line(f"  {entry['text']}")
        value = f"{entry['value']} ({entry['origin']})" if entry["value"] is not None else ""
        rows = [
            ("now", value),
            ("default", entry["default"]),
            ("takes", entry["takes"]),
            ("changes", _change(entry["reload"])),
            ("variable", entry["environment"]),
        ]
        context.out.facts([(f"  {name}", text) for name, text in rows])
    return exits.OK


def _change(reload: str) -> str:
    return {"live": "live: a reload does it, nobody notices", "engine": "with the engine: a reload restarts it", "restart": "with a restart of llmd"}[reload]


def _daemons_words(argument: str) -> str:
    """The keys' texts belong to the daemon's code, which llmctl does not load for its other verbs."""
    done = subprocess.run([sys.executable, "-P", "-m", "llmd.config.explain", argument], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise CtlError(exits.BAD_INPUT, done.stderr.strip() or "the configuration's keys cannot be read")
    return done.stdout
