"""`Exchange`: what is known of one HTTP request while it lasts; written by the handlers, read by the gate that counts and logs it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from llmd.errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Key of the Exchange in the ASGI scope.
KEY: Final = "llmd.exchange"
#: Key of a RequestError in the ASGI scope: what was wrong with bytes of the body, for which the server has closed the connection.
FAULT: Final = "llmd.fault"
#: Key of the connection's transport in the ASGI scope.
TRANSPORT: Final = "llmd.transport"
#: Key of the response's BodyPipe (llmd.frontend.server) in the ASGI scope.
PIPE: Final = "llmd.pipe"

#: Status in the access log of a request whose client left before the answer.
CLIENT_GONE: Final = 499

#: Outcomes from best to worst: of several choices the worst is counted.
OUTCOMES: Final = (
    "ok",
    "stop",
    "tool_calls",
    "length",
    "abort",
    "client_disconnect",
    "slow_client",
    "rejected",
    "invalid",
    "not_found",
    "unauthorized",
    "too_large",
    "queue_timeout",
    "request_timeout",
    "error",
)
_BY_CODE: Final = {
    "aborted": "abort",
    "reloaded": "abort",
    "queue_timeout": "queue_timeout",
    "request_timeout": "request_timeout",
    "loading": "rejected",
    "draining": "rejected",
}
_BY_STATUS: Final = {401: "unauthorized", 403: "unauthorized", 404: "not_found", 413: "too_large", 429: "rejected"}


def outcome_of(error: RequestError) -> str:
    """The `outcome` label for an error."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if error.status in _BY_STATUS:
        return _BY_STATUS[error.status]
    return "invalid" if error.status < 500 else "error"


class Exchange:
    """One HTTP request."""

    __slots__ = ("completion_tokens", "endpoint", "key", "outcome", "prompt_tokens", "request_id", "rid", "started", "status")

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.endpoint: str | None = None
        """The route that was taken, as a metric label; None for paths that nobody serves."""
        self.key = ""
        """Name of the API key."""
        self.request_id = ""
        self.rid = ""
        self.status = 0
        self.outcome: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def settle(self, outcome: str) -> None:
        """Note an outcome; the worst one stays."""
        if self.outcome is None or OUTCOMES.index(outcome) > OUTCOMES.index(self.outcome):
            self.outcome = outcome


def exchange_of(scope: Scope) -> Exchange:
    """The Exchange of a request that is with the gate."""
    found = scope[KEY]
    assert isinstance(found, Exchange)
    return found
