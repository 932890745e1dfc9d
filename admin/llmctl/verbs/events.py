"""Show what has happened: changes of state, deaths and returns of processes, operations, configuration. `-f` goes on until interrupted.

Each event has a number (SEQ) that never comes again while llmd runs; `--since SEQ` shows those after it. A `gap` says that older ones are forgotten. When the
connection is lost, `-f` connects again and goes on where it was. Times are UTC.
"""

from __future__ import annotations

import json
import time
from typing import Any

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import one_line, when

#: Seconds without a sign of life after which a stream is taken for dead; the daemon sends one every 15 s.
SILENCE = 40.0
AGAIN = 1.0
_COLOURS = {"error": "red", "warning": "yellow"}


def run(context: Context) -> int:
    options = context.options
    try:
        events = _wanted(context, context.get("/v1/events", since=options.since, follow="false")["events"])
    except CtlError as error:
        if error.status != exits.NOT_RUNNING:
            raise
        left = "events end with llmd; what stays on disk: llmctl crashes, llmctl audit, llmctl logs"
        raise CtlError(error.status, error.message, f"{left}; {error.hint}" if error.hint else left, error.data) from None
    shown = events[max(0, len(events) - options.lines) :]
    if not options.follow and not context.out.is_table:
        context.out.data(shown)
        return exits.OK
    for event in shown:
        _show(context, event)
    if options.follow:
        _follow(context, max([options.since, *(event["seq"] for event in events)]))
    return exits.OK


def _follow(context: Context, since: int) -> None:
    while True:
        try:
            for line in context.client.stream(f"/v1/events?since={since}", SILENCE):
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    since = event["seq"]
                    for wanted in _wanted(context, [event]):
                        _show(context, wanted)
        except CtlError as error:
            if error.status not in (exits.LOST, exits.NOT_ANSWERING, exits.NOT_RUNNING):
                raise
            context.note(f"llmctl: {error.message}; trying again")
            time.sleep(AGAIN)


def _wanted(context: Context, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kind = context.options.kind
    return [event for event in events if kind is None or event["kind"] in (kind, "gap")]


def _show(context: Context, event: dict[str, Any]) -> None:
    out = context.out
    if not out.is_table:
        out.line(json.dumps(event))  # one a line, so that a stream can be read
    else:
        message = out.paint(one_line(event["message"]), _COLOURS.get(event["severity"]))
        out.line(f"{event['seq']:>6}  {when(event['at'])}  {event['kind']:<9}  {message}")
    out.flush()
