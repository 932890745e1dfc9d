"""Adapters. This version has none: `list` is empty, `load` and `unload` are refused by the daemon."""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError


def run(context: Context) -> int:
    options = context.options
    if options.what == "list":
        if context.out.is_table:
            context.note("LoRA adapters are not there yet")
        else:
            context.out.data([])
        return exits.OK
    if not options.name or (options.what == "load") != bool(options.path):
        raise CtlError(exits.USAGE, "lora load NAME PATH, or lora unload NAME")
    return context.report(context.change(f"/v1/lora/{options.what}", {"name": options.name, "path": options.path}), f"{options.what}ed: {options.name}")
