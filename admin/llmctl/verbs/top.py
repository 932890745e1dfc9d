"""Watch llmd on a full screen: state, speed, processes, KV cache, requests, events and logs; and change things, with the plan shown first.

Keys: `1` to `5` tabs, `/` filter, `s` sort, `?` help, `^p` every command by name, `q` quit; `f` flush, `l` reload, `w` reload weights, `d` drain, `e` resume,
`r` restart, and on tab 4 `a` abort the marked request. It asks once a second; what the last 15 minutes were like it asks llmd when it starts. Times are UTC.
While llmd does not answer it goes on trying, shows what it knew in grey with its age, and says why and what to type. The last 1,000 events and 1,000 log
lines are kept. `--once` prints the overview as text and ends like `status`: 0 ready, 1 up but not ready, 3 not running, 4 not answering.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from llmctl import exits
from llmctl.client import Client
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.logfiles import Logs, directory, pretty
from llmctl.output import duration, one_line
from llmctl.top import plain
from llmctl.top.feed import KEPT, Feed
from llmctl.verbs._answers import leftovers

#: Log lines that are shown at first.
LINES: Final = 200


def run(context: Context) -> int:
    if context.options.once:
        return _once(context)
    if not _is_terminal():
        raise CtlError(exits.USAGE, "top needs a terminal that can be drawn on; without one: llmctl top --once, llmctl status -w, llmctl status -o json")
    # textual takes half a second to import: only here.
    from llmctl.top.app import Top

    colour = not context.options.no_color and not os.environ.get("NO_COLOR")
    logs = _logs(context) if context.client.remote is None else None  # another machine's log is not here
    app = Top(Feed(context.client, logs=logs, left=lambda error: _left(context.client, error)), colour=colour)
    app.run()
    return app.return_code or exits.OK


def _is_terminal() -> bool:
    """Whether there is one to draw on, and it says what it is. Textual draws on stderr."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def _once(context: Context) -> int:
    feed = Feed(context.client, left=lambda error: _left(context.client, error))
    picture = feed.poll()
    if context.out.is_table:
        plain.show(context.out, feed)
    else:
        context.out.data(plain.data(feed))
    if picture.error is not None:
        return picture.error.status
    return exits.OK if picture.status.get("state") == "ready" else exits.FAILED


def _left(client: Client, error: CtlError) -> dict[str, Any]:
    """State and reason of a daemon that does not answer, from the files of its run directory; nothing where there are none."""
    if client.remote is not None or error.status not in (exits.NOT_RUNNING, exits.NOT_ANSWERING, exits.LOST):
        return {}
    answer, _, _ = leftovers(client, error)
    if not answer["last_state"] and answer["state"] != "starting":
        return {}
    how = {"stopped": "it has ended, as asked", "died": f"it was killed, or ended without a word; it was {answer['last_state']}"}.get(answer["state"])
    return {"state": answer["state"], "reason": f"{how}, {duration(answer['last_state_age_s'])} ago" if how else one_line(answer["reason"])}


def _logs(context: Context) -> Callable[[], list[str]]:
    """The last lines at the first call, then those that have come since. Another daemon may log elsewhere: it is looked up until it is found."""
    kept: list[Logs] = []

    def lines() -> list[str]:
        if kept:
            return [pretty(line) for line in kept[0].more(newest=True)[-KEPT:]]
        logs = Logs(directory(context.client), without=("access",))  # one line a request would drown the rest
        found = [pretty(line) for line in logs.last(LINES)]
        kept.append(logs)
        return found

    return lines
