"""Set the least severe level that is logged, of all processes, of a role (`scheduler`), or of one process (`scheduler-0`): at once, until llmd restarts.

`default` goes back to what the configuration says (observability.log_level, which `llmctl reload` changes for good).
"""

from __future__ import annotations

from llmctl.context import Context


def run(context: Context) -> int:
    options = context.options
    reply = context.change("/v1/log-level", {"level": options.level, "process": options.process})
    data = (reply or {}).get("data") or {}
    return context.report(reply, f"{data.get('level')}: {', '.join(data.get('processes') or [])}")
