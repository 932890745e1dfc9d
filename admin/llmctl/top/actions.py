"""What can be changed from the dashboard: each is a verb of the table, a call of the admin plane, and the llmctl line that does the same."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from llmctl.exits import CtlError
from llmctl.top.feed import PATIENCE, Asks
from llmctl.verb import Verb
from llmctl.verbs import VERBS

#: Seconds in which a change begins or is refused, and between two looks at how far it is.
BEGIN: Final = 15.0
LOOK: Final = 0.25
REASON: Final = "asked for in llmctl top"


@dataclass(frozen=True)
class Action:
    """One change."""

    verb: str
    """Of llmctl."""
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """What follows the verb on the command line."""
    said: str = ""
    """What it does, where the verb's own line says more than that."""
    title: str = ""
    """What it is called, if not as its verb."""
    patience: float = BEGIN
    """Seconds in which it begins or is refused."""

    @property
    def line(self) -> str:
        """The equivalent command."""
        return shlex.join(("llmctl", self.verb, *self.arguments))

    @property
    def about(self) -> Verb:
        return VERBS[self.verb]

    @property
    def what(self) -> str:
        """What it does, in a line."""
        return self.said or self.about.line


ACTIONS: Final = {
    "flush": Action("flush", "/v1/flush"),
    "reload": Action("reload", "/v1/config/reload", said="take the changed configuration file"),
    "drain": Action("drain", "/v1/drain"),
    "resume": Action("resume", "/v1/resume"),
    "restart": Action("restart", "/v1/restart"),
    "abort all": Action("abort", "/v1/abort", {"all": True}, ("--all",), "end all requests"),
    "stop": Action("stop", "/v1/stop"),
    "log-level debug": Action("log-level", "/v1/log-level", {"level": "debug"}, ("debug",)),
    "log-level default": Action("log-level", "/v1/log-level", {}, ("default",)),
}


def abort(rid: str) -> Action:
    """End exactly this request."""
    return Action("abort", "/v1/abort", {"rid": rid}, (rid,), "end exactly this request")


#: What happens to running requests when weights are reloaded -> in words. "": as reload.mode says.
MODES: Final = {
    "": "as reload.mode of the configuration says",
    "drain": "running requests finish first",
    "abort": "running requests end with an error",
    "now": "those that have begun to answer end with an error, the others are held",
}
#: Seconds in which new weights are checked.
_CHECK: Final = 60.0


def reload_weights(path: str, version: str = "", mode: str = "") -> Action:
    """Load other weights of the same shape. The daemon refuses a path that is not absolute; "dummy" is its own."""
    chosen = {"version": version, "mode": mode}
    arguments = [part for name, value in chosen.items() if value for part in (f"--{name}", value)]
    body = {"path": path, **{name: value for name, value in chosen.items() if value}}
    return Action("reload", "/v1/reload", body, ("weights", path, *arguments), "load other weights of the same shape", "reload weights", _CHECK)


def plan(asks: Asks, action: Action) -> dict[str, Any]:
    """What the daemon would do. Raises CtlError where it is refused."""
    answer = asks.post(action.path, {**action.body, "dry_run": True}, action.patience)
    found: dict[str, Any] = answer.get("plan") or {}
    return found


def carry_out(asks: Asks, action: Action, said: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Do it, and return its record once it is over; `said` gets each record on the way. Raises CtlError where it is refused.

    While the daemon does not answer it goes on asking: what was begun goes on there, or ends with it and is told then."""
    record: dict[str, Any] = asks.post(action.path, {**action.body, "wait": False, "reason": REASON}, action.patience)
    while record.get("state") in ("pending", "running"):
        said(record)
        time.sleep(LOOK)
        try:
            record = asks.get(f"/v1/operations/{record['id']}", PATIENCE)
        except CtlError as error:
            if error.data is not None:  # it answers, and does not know it: another daemon
                raise
            said({**record, "message": error.message})
    return record
