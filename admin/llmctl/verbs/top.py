"""Watch llmd on a full screen: state, speed, processes, KV cache, requests, events and logs; and change things, with the plan shown first.

Keys: `1` to `5` tabs, `/` filter, `s` sort, `?` help, `^p` every command by name, `q` quit; `f` flush, `l` reload, `d` drain, `e` resume, `r` restart, and on
tab 4 `a` abort the marked request. It asks once a second and keeps the last 15 minutes itself. While llmd does not answer it goes on trying, shows what it
knew in grey with its age, and says why and what to type. `--once` prints the overview as text and ends like `status`: 0 ready, 1 up but not ready, 3 not
running, 4 not answering.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.logfiles import Logs, directory, pretty
from llmctl.top import plain
from llmctl.top.feed import Feed

#: Log lines that are shown at first.
LINES: Final = 200


def run(context: Context) -> int:
    if context.options.once:
        return _once(context)
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # textual draws on stderr
        raise CtlError(exits.USAGE, "top needs a terminal", "llmctl top --once prints the overview; llmctl status -w repeats it")
    # textual takes half a second to import: only here.
    from llmctl.top.app import Top

    colour = not context.options.no_color and not os.environ.get("NO_COLOR")
    logs = _logs(context) if context.client.remote is None else None  # another machine's log is not here
    app = Top(Feed(context.client, logs=logs), colour=colour)
    app.run()
    return app.return_code or exits.OK


def _once(context: Context) -> int:
    feed = Feed(context.client)
    picture = feed.poll()
    if context.out.is_table:
        plain.show(context.out, feed)
    else:
        context.out.data(plain.data(feed))
    if picture.error is not None:
        return picture.error.status
    return exits.OK if picture.status.get("state") == "ready" else exits.FAILED


def _logs(context: Context) -> Callable[[], list[str]]:
    """The last lines at the first call, then those that have come since. Another daemon may log elsewhere: it is looked up until it is found."""
    kept: list[Logs] = []

    def lines() -> list[str]:
        if kept:
            return [pretty(line) for line in kept[0].more()]
        logs = Logs(directory(context.client), without=("access",))  # one line a request would drown the rest
        found = [pretty(line) for line in logs.last(LINES)]
        kept.append(logs)
        return found

    return lines
