"""What both endpoints' answers share: the head that is the same in every chunk, made once, so that a token costs one small join."""

from __future__ import annotations

import time
from typing import Any, Protocol

from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, Generation

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Turns what the engine brings into an answer's bytes."""

    stream: bool
    usage: Usage

    def begin(self, generation: Generation) -> None:
        """The choices have been submitted. May raise RequestError, which ends them."""
        return

    def chunk(self, delta: Delta) -> bytes:
        """Events for what one choice has to add; may be empty."""
        ...

    def closing(self) -> bytes:
        """Events after the last choice is finished, `[DONE]` not included."""
        ...

    def body(self, deltas: list[Delta]) -> bytes:
        """The whole answer, of one Delta a choice."""
        ...


class Head:
    """id, object, created, model and system_fingerprint of one answer."""

    def __init__(self, rid: str, kind: str, model: str, fingerprint: str, *, usage_wanted: bool) -> None:
        self._fields = {"id": rid, "object": kind, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._usage_wanted = usage_wanted
        self._before = b"data: " + dumps(self._fields)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if usage_wanted else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        """One chunk with one choice."""
        return b"%b%b%b" % (self._before, choice, self._after)

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk, only where the client asked for it."""
        if not self._usage_wanted:
            return b""
        return b"data: " + dumps({**self._fields, "choices": [], "usage": usage.body()}) + b"\n\n"

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """An answer that is not streamed."""
        return dumps({**self._fields, "choices": choices, "usage": usage.body()})
