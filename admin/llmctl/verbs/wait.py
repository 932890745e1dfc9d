"""Wait until llmd is ready, drained, has stopped, or serves other weights: `--for=ready|drained|stopped|version=NAME`. Or until an operation is over.

Waits for --timeout at most (15 min), also while llmd is not there yet; exit 124 then. `--operation ID`: exits as that operation did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmctl import exits
from llmctl.context import PATIENCE, Context
from llmctl.exits import CtlError

_AWAY = (exits.NOT_RUNNING, exits.NOT_ANSWERING, exits.LOST, exits.TIMED_OUT)


def run(context: Context) -> int:
    limit = context.options.timeout or PATIENCE
    if context.options.operation:
        return _operation(context, context.options.operation, limit)
    what = context.options.what
    check = _check(context, what)
    version = what.removeprefix("version=")
    context.wait(f"llmd is {what}" if version == what else f"llmd serves weights version {version}", check, limit)
    context.out.line(what)
    return exits.OK


def _check(context: Context, what: str) -> Callable[[], bool]:
    name, _, value = what.partition("=")
    if name == "version" and value:
        return lambda: (_status(context).get("state"), _status(context).get("weights_version")) == ("ready", value)
    if what == "ready":
        return lambda: _status(context).get("state") == "ready"
    if what == "drained":
        return lambda: _drained(_status(context))
    if what == "stopped":
        return lambda: not _status(context) and context.client.place_or_none() is None
    raise CtlError(exits.USAGE, f"--for: expected ready, drained, stopped or version=NAME, got {what!r}")


def _drained(status: dict[str, Any]) -> bool:
    return status.get("state") == "draining" and status.get("in_flight") == 0


def _status(context: Context) -> dict[str, Any]:
    """Empty while nobody answers."""
    try:
        status = context.client.get("/v1/status", 2.0)
    except CtlError as error:
        if error.status not in _AWAY:
            raise
        return {}
    return status if isinstance(status, dict) else {}


def _operation(context: Context, number: str, limit: float) -> int:
    found: dict[str, Any] = {}

    def over() -> bool:
        found.update(context.client.get(f"/v1/operations/{number}", 5.0))
        return found.get("state") not in ("pending", "running")

    context.wait(f"operation {number} is over", over, limit)
    return context.report(found, f"{found.get('verb')}: {found.get('state')}")
