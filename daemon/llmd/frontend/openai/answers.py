"""What both endpoints' answers share: the head that is the same in every chunk, made once, so that a token costs one small join."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

from msgspec import Raw

from llmd.frontend.openai.params import RequestParams
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, Generation
from llmd.wire.messages import TokenLogprob

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
    """id, object, created, model and system_fingerprint of one answer; the bytes around each chunk are made once."""

    def __init__(self, rid: str, kind: str, model: str, fingerprint: str, params: RequestParams, usage: Usage) -> None:
        self._fields = {"id": rid, "object": kind, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._usage = usage
        self._usage_wanted = params.include_usage
        self._in_each = params.continuous_usage
        self._open = b"data: " + dumps(self._fields)[:-1] + b","
        self._before = self._open + b'"choices":['
        self._after = b'],"usage":null}\n\n' if params.include_usage else b"]}\n\n"
        self._shown = 0
        """Output tokens in the chunks so far."""

    def event(self, choice: bytes, tokens: int = 0, extra: bytes = b"") -> bytes:
        """One chunk with one choice that brings `tokens`; `extra`: fields beside `choices`, each with a comma after it."""
        self._shown += tokens
        before = self._open + extra + b'"choices":[' if extra else self._before
        after = b'],"usage":%b}\n\n' % dumps(self._usage.counts(self._shown)) if self._in_each else self._after
        return b"%b%b%b" % (before, choice, after)

    def frame(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """What stands around the one thing that changes from chunk to chunk of a choice; None where more does."""
        return None if self._in_each else (self._before + before, after + self._after)

    def usage_event(self) -> bytes:
        """The last chunk, only where the client asked for it."""
        if not self._usage_wanted:
            return b""
        return b"data: " + dumps({**self._fields, "choices": [], "usage": self._usage.body()}) + b"\n\n"

    def whole(self, choices: Iterable[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """An answer that is not streamed; `extra`: fields beside `choices`. One choice at a time is there as objects."""
        return dumps({**self._fields, "choices": [Raw(dumps(choice)) for choice in choices], "usage": self._usage.body(), **extra})


class Held:
    """Tokens of one choice whose text has not come yet: their ids and logprobs go with the text."""

    __slots__ = ("ids", "logprobs", "prompt_logprobs")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    def add(self, delta: Delta) -> None:
        """Take in what a Delta has beside its text."""
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs or ()

    def clear(self) -> None:
        """It has been sent."""
        self.ids, self.logprobs, self.prompt_logprobs = [], [], []
