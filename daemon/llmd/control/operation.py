"""`Operation`: the record of one administrative change, and the errors that speak of one."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from llmd.control.channel import RankReply
from llmd.control.effects import Effect
from llmd.control.peer import Peer
from llmd.errors import RequestError

OperationState = Literal["pending", "running", "succeeded", "partial", "failed", "rolled_back"]


class Operation(Struct, kw_only=True):
    """One administrative change. Times are Unix seconds."""

    id: str
    verb: str
    params: dict[str, Any]
    reason: str
    state: OperationState = "pending"
    started_at: float = 0.0
    finished_at: float | None = None
    by: Peer = Peer()
    """Who asked for it."""
    key: str | None = None
    """The caller's Idempotency-Key."""
    plan: dict[str, Any] | None = None
    results: list[RankReply] = []
    """One a rank."""
    changes: list[Effect] = []
    """What it has changed; where it failed, what it was to change."""
    outcome: Literal["known", "unknown"] = "known"
    """Whether it is known what was carried out."""
    message: str = ""
    code: str | None = None
    data: dict[str, Any] = {}

    @property
    def over(self) -> bool:
        return self.state not in ("pending", "running")


class OperationFailed(RequestError):
    """The operation was refused or failed; carries its record, if it got that far."""

    def __init__(self, cause: RequestError, operation: Operation | None) -> None:
        super().__init__(cause.message, code=cause.code, param=cause.param, status=cause.status)
        self.hint = cause.hint
        self.operation = operation
        self.holder: str | None = getattr(cause, "holder", None)


class Conflict(RequestError):
    """Another operation is in the way: `holder` is its id."""

    def __init__(self, message: str, code: str, holder: Operation) -> None:
        super().__init__(message, code=code)
        self.holder = holder.id
        self.hint = f"llmctl wait --operation {holder.id} (GET /v1/operations/{holder.id}), then try again"


def replay(earlier: Operation, verb: str, raw: dict[str, Any]) -> Operation:
    """The answer of an operation that is over, once more."""
    if (earlier.verb, earlier.params) != (verb, raw):
        raise OperationFailed(RequestError("this Idempotency-Key was used for another call", param="Idempotency-Key", status=409), None)
    if earlier.state == "succeeded":
        return earlier
    raise OperationFailed(RequestError(earlier.message, code=earlier.code), earlier)


def stopped() -> RequestError:
    """The error of an operation that a stop of llmd ends."""
    return RequestError("llmd is being stopped: this was not finished", code="shutting_down")


def refusal(refused: dict[str, str]) -> RequestError:
    """The error of a plan that is refused."""
    error = RequestError(refused["message"], code=refused["code"], status=409)
    error.hint = refused["hint"]
    return error
