"""Show the last log lines of all processes in the order of time, or of those named, like `scheduler-0`.

Reads the files in log_dir; under systemd the journal has the same lines (`journalctl -u llmd`).
"""

from __future__ import annotations

import time
from pathlib import Path

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.logfiles import Logs, directory, pretty, raw

FOLLOW_EVERY = 0.2


def run(context: Context) -> int:
    options = context.options
    where = Path(options.dir) if options.dir else directory(context.client)
    logs = Logs(where, options.process)
    if not logs.files():
        known = ", ".join(path.stem for path in Logs(where).files()) or "none"
        raise CtlError(exits.FAILED, f"no such log in {where}; there are: {known}", "with --dir, or under systemd: journalctl -u llmd")
    show = pretty if context.out.is_table else raw  # `-o json` leaves a line as it is
    for line in logs.last(options.lines):
        context.out.line(show(line))
    while options.follow:
        context.out.flush()
        for line in logs.more():
            context.out.line(show(line))
        time.sleep(FOLLOW_EVERY)
    return exits.OK
