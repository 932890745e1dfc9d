"""Show the versions of llmctl and of the daemon it reaches; without a daemon, its own."""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmd import __version__


def run(context: Context) -> int:
    versions: dict[str, str | None] = {"llmctl": __version__, "llmd": None}
    try:
        versions["llmd"] = context.get("/v1/status").get("version")
    except CtlError as error:
        context.note(f"llmctl: {error.message}")
    if context.out.is_table:
        context.out.facts([(name, version or "-") for name, version in versions.items()])
    else:
        context.out.data(versions)
    if versions["llmd"] not in (None, __version__):
        context.note("the versions differ: restart llmd after an upgrade")
    return exits.OK
