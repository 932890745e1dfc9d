"""Say in one word whether llmd can generate now. The same exit statuses and JSON as `status`: 0 ready, 1 up, 3 not running, 4 not answering."""

from __future__ import annotations

from llmctl.context import Context
from llmctl.verbs._answers import fetch


def run(context: Context) -> int:
    status, code, error = fetch(context)
    if not context.out.is_table:
        context.out.data(status)
    elif error is None:
        stage = status.get("stage") or status.get("reason")
        context.out.line(context.out.state(str(status.get("state"))) + (f" ({stage})" if stage else ""))
    else:
        context.out.line("not answering" if status["running"] and status["state"] != "starting" else str(status["state"]))
    if error is not None:
        context.note(f"llmctl: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
    return code
