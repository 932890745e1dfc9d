"""What a worker shows of itself to operators, with each heartbeat: the requests that it has, and the prefixes that it keeps. Never a text.

`age_s` and its like count from now backwards, so that no two clocks are compared.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

#: Rows in one table at most; `Tables.requests_total` says how many there are.
MAX_REQUESTS: Final = 2048

RequestPhase = Literal["waiting", "prefill", "decode"]


class OwnedRequest(Struct, frozen=True, array_like=True):
    """One choice of a request, as its frontend knows it."""

    rid: str
    request: str
    """The rid of the HTTP request it belongs to; its own where there is one choice."""
    client_id: str
    age_s: float
    prompt_tokens: int
    output_tokens: int
    """Delivered."""
    max_new_tokens: int
    """0: it generates nothing."""
    first_token_s: float
    """From its arrival to its first token; 0: there is none yet."""
    silent_s: float
    """Since its last token; 0: there is none yet."""
    streamed: bool


class ScheduledRequest(Struct, frozen=True, array_like=True):
    """The same as a scheduler rank knows it."""

    rid: str
    frontend: int
    phase: RequestPhase
    age_s: float
    waited_s: float
    """In the queue, all waits together."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    pages: int
    """KV pages that it holds, shared ones included."""
    priority: int


class Prefix(Struct, frozen=True, array_like=True):
    """One node of the prefix tree. Its name tells nothing of its tokens."""

    name: str
    start: int
    """Tokens before it."""
    tokens: int
    pages: int
    below: int
    """Pages of what continues it."""
    hits: int
    users: int
    """Running requests that use it or what continues it."""


class Tables(Struct, frozen=True, array_like=True):
    """All tables of one worker."""

    owned: list[OwnedRequest] = []
    scheduled: list[ScheduledRequest] = []
    requests_total: int = 0
    prefixes: list[Prefix] = []
    """The biggest ones."""
    prefixes_total: int = 0
