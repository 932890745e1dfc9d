"""What every verb gets: the options, the client and the output."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmctl import exits
from llmctl.client import Client
from llmctl.exits import CtlError
from llmctl.output import Output

#: Seconds within which a question is answered; `status` and `health` promise an answer in under 3 s, start-up included.
READ_TIMEOUT = 2.0
#: Seconds for a change that does not wait for anything, and for one that loads a model.
CHANGE_TIMEOUT = 15.0
PATIENCE = 900.0
#: Seconds that a connection outlives the limit that the daemon was given.
GRACE = 10.0
POLL = 0.1


@dataclass(frozen=True)
class Context:
    """One run of llmctl."""

    options: argparse.Namespace
    client: Client
    out: Output

    def read_timeout(self) -> float:
        return float(self.options.timeout or READ_TIMEOUT)

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(path, self.read_timeout(), **query)

    def change(self, path: str, body: dict[str, Any], *, waits: bool = False) -> dict[str, Any]:
        """POST a change, with --reason. A verb that `waits` passes --timeout on, and its connection outlives the daemon's own limit a little."""
        limit = self.options.timeout
        if waits and limit:
            body = {**body, "timeout_s": limit}
        if self.options.reason:
            body = {**body, "reason": self.options.reason}
        patience = PATIENCE if waits else CHANGE_TIMEOUT
        try:
            reply = self.client.post(path, body, limit + GRACE if limit else patience)
        except CtlError as error:
            if error.data and not self.out.is_table:
                self.out.data(error.data)
            raise
        return reply if isinstance(reply, dict) else {"data": {"result": reply}}

    def note(self, text: str) -> None:
        """Something for people, beside the data."""
        print(text, file=sys.stderr)

    def wait(self, what: str, check: Callable[[], bool], limit: float) -> None:
        """Poll until `check` is true. Raises CtlError (124)."""
        deadline = time.monotonic() + limit
        while not check():
            if time.monotonic() > deadline:
                raise CtlError(exits.TIMED_OUT, f"not within {limit:g} s: {what}", "llmctl status")
            time.sleep(POLL)

    def report(self, reply: dict[str, Any], done: str) -> int:
        """Show what a change led to: the data, or `done` and one line for each rank; 1 unless it succeeded as a whole."""
        state = str(reply.get("state") or "succeeded")
        failed = state in ("failed", "partial", "rolled_back")
        if not self.out.is_table:
            self.out.data(reply)
        else:
            self.out.line(f"{self.out.state(state)}: {reply.get('error') or reply.get('message') or state}" if failed else done)
            results = reply.get("results")
            if isinstance(results, list) and (failed or self.out.is_wide):
                self.out.table(["RANK", "RESULT"], [[_rank(item), _result(item)] for item in results])
        if state in ("pending", "running"):
            self.note(f"operation {reply.get('id')} goes on")
        return exits.FAILED if failed else exits.OK


def _rank(item: Any) -> str:
    return f"{item.get('role')}-{item.get('rank')}" if isinstance(item, dict) else ""


def _result(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    said = item.get("message") or item.get("code") or ("" if item.get("answered", True) else "did not answer")
    return ("ok " if item.get("ok") else "failed ") + str(said)
