"""What every verb gets: the options, the client and the output."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from llmctl import exits
from llmctl.client import Client, ConnectionLost
from llmctl.exits import CtlError
from llmctl.output import Output, plan_lines
from llmctl.verb import Verb

#: Seconds within which a question is answered; `status` and `health` promise an answer in under 3 s, start-up included.
READ_TIMEOUT = 2.0
#: Seconds for a change that does not wait for anything, and for one that loads a model.
CHANGE_TIMEOUT = 15.0
PATIENCE = 900.0
A_DAY = 86400.0
#: Seconds that a connection outlives the limit that the daemon was given.
GRACE = 10.0
POLL = 0.1
#: Seconds within which a control that has died is replaced, and how often one call may lose it.
BACK_WITHIN = 20.0
ASKED_AGAIN = 3


@dataclass(frozen=True)
class Context:
    """One run of llmctl."""

    options: argparse.Namespace
    client: Client
    out: Output
    verb: Verb

    def read_timeout(self) -> float:
        return float(self.options.timeout or READ_TIMEOUT)

    def get(self, path: str, **query: Any) -> Any:
        began = time.monotonic()
        try:
            return self.client.get(path, self.read_timeout(), **query)
        except CtlError as error:
            waited = time.monotonic() - began
            if error.status == exits.NOT_ANSWERING and self.options.timeout and waited > 0.9 * self.read_timeout():
                raise CtlError(exits.TIMED_OUT, error.message, error.hint, error.data) from None
            raise

    def change(self, path: str, body: dict[str, Any], *, waits: bool = False) -> dict[str, Any] | None:
        """POST a change, with --reason. A verb that `waits` passes --timeout on, and its connection outlives the daemon's own limit a little.

        None: it was only planned (--dry-run), and the plan has been shown. Raises CtlError, also where the operator says no."""
        options = self.options
        limit = options.timeout or (A_DAY if options.wait and waits else None)
        body = {name: value for name, value in body.items() if value is not None}
        if waits and limit:
            body["timeout_s"] = limit
        if options.dry_run:
            self._show_plan(self._post(path, {**body, "dry_run": True}, CHANGE_TIMEOUT))
            return None
        self.confirm(path, body)
        if options.reason:
            body["reason"] = options.reason
        if getattr(options, "no_wait", False):
            body["wait"] = False
        reply = self._post(path, body, limit + GRACE if limit else PATIENCE if waits else CHANGE_TIMEOUT)
        return reply if isinstance(reply, dict) else {"data": {"result": reply}}

    def _post(self, path: str, body: dict[str, Any], patience: float) -> Any:
        try:
            return self._answer(path, body, patience)
        except CtlError as error:
            if error.data and not self.out.is_table:
                self.out.data(error.data)
            raise

    def _answer(self, path: str, body: dict[str, Any], patience: float) -> Any:
        """The answer, be it of another control than was asked: one that replaces the first goes on with what it finds begun, and is asked for the same call."""
        ends = path == "/v1/stop" or body.get("target") == "daemon"
        key = None if body.get("dry_run") or ends else f"llmctl-{os.urandom(8).hex()}"
        deadline = time.monotonic() + patience
        for _ in range(ASKED_AGAIN if key else 0):
            try:
                return self.client.post(path, body, max(1.0, deadline - time.monotonic()), key)
            except ConnectionLost:
                if not self._answers_again(min(deadline, time.monotonic() + BACK_WITHIN)):
                    raise
                self.note("llmd's control process was replaced; asking the new one for the outcome")
        return self.client.post(path, body, max(1.0, deadline - time.monotonic()), key)

    def _answers_again(self, deadline: float) -> bool:
        """Whether the daemon that has just been lost answers before `deadline`; one that has ended does not."""
        while self.client.alive() and time.monotonic() < deadline:
            try:
                self.client.get("/v1/status", READ_TIMEOUT)
                return True
            except CtlError:
                time.sleep(POLL)
        return False

    def confirm(self, path: str, body: dict[str, Any]) -> None:
        """On a terminal a risky change shows its plan, and waits for a yes. Without one nobody is there to ask, and nothing is."""
        if self.verb.risk in ("read", "safe") or self.options.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        plan = self._post(path, {**body, "dry_run": True}, CHANGE_TIMEOUT).get("plan") or {}
        for line in plan_lines(plan):
            self.note(line)
        print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CtlError(exits.FAILED, "nothing was done")

    def _show_plan(self, reply: dict[str, Any]) -> None:
        if not self.out.is_table:
            self.out.data(reply)
            return
        for line in plan_lines(reply.get("plan") or {}):
            self.out.line(line)

    def note(self, text: str) -> None:
        """Something for people, beside the data."""
        print(text, file=sys.stderr)

    def note_none(self, rows: Sized) -> None:
        """Say of a table without rows that this is the answer."""
        if not rows:
            self.note("none")

    def wait(self, what: str, check: Callable[[], bool], limit: float) -> None:
        """Poll until `check` is true. Raises CtlError (124)."""
        deadline = time.monotonic() + limit
        while not check():
            if time.monotonic() > deadline:
                raise CtlError(exits.TIMED_OUT, f"waited {limit:g} s until {what}, in vain", "llmctl status")
            time.sleep(POLL)

    def watch(self, show: Callable[[], int]) -> int:
        """`show` once, or with --watch again and again until interrupted. On a terminal each time on a clean screen."""
        every = self.options.watch
        if every is None:
            return show()
        while True:
            self.out.clear()
            try:
                show()
            except CtlError as error:
                self.note(f"llmctl: {error.message}")
            sys.stdout.flush()
            time.sleep(every)

    def report(self, reply: dict[str, Any] | None, done: str) -> int:
        """Show what a change led to: the data, or `done` and one line for each rank; 1 unless it succeeded as a whole."""
        if reply is None:
            return exits.OK
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
