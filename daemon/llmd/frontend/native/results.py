"""Results in SGLang's shape: `{"text", "output_ids", "meta_info": {...}}`. Pieces go in, what there is so far comes out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from msgspec import Raw

from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, ReqState
from llmd.wire.messages import Finish, TokenLogprob

#: (logprob, token id, text or None): SGLang's entry.
Entry = tuple[float | None, int, str | None]


class Growing:
    """A list that only grows and is shown again and again."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def extend(self, items: Iterable[Any]) -> None:
        """Put `items` at its end."""
        self._items.extend(items)

    def shown(self) -> Any:
        """All there is so far, the caller's own."""
        return list(self._items)


class GrowingJson(Growing):
    """The same as JSON; what is in it is encoded once, however often it is shown."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self._bytes += b"," if self._bytes else b"["
            self._bytes += dumps(item)

    def shown(self) -> Raw:
        return Raw(self._bytes + b"]" if self._bytes else b"[]")


class Result:
    """One choice. Everything is cumulative, as in SGLang's streams."""

    def __init__(self, state: ReqState, *, name: str, weights_version: str, logprobs: int, logprob_start: int, with_text: bool, growing: type[Growing]) -> None:
        self._state = state
        self._name = name
        self._weights = weights_version
        self._top = logprobs
        self._start = logprob_start
        self._with_text = with_text
        self._began = time.monotonic()
        self._text: list[str] = []
        self._lists: dict[str, Growing] = {}
        if logprobs >= 0:
            names = [f"{of}_{what}" for what in ("token_logprobs", "top_logprobs")[: 2 if logprobs > 0 else 1] for of in ("input", "output")]
            self._lists = {name: growing() for name in names}

    def add(self, delta: Delta) -> None:
        """Take in the next piece."""
        if delta.text:
            self._text.append(delta.text)
        if self._top >= 0:
            self._extend("output", delta.logprobs)
            if delta.prompt_logprobs is not None and self._start >= 0:
                self._extend("input", delta.prompt_logprobs[self._start :])

    def body(self) -> dict[str, Any]:
        """What there is so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        state = self._state
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": finish_reason(state.finish, len(state.output_ids)),
            "prompt_tokens": len(state.request.input_ids),
            "completion_tokens": len(state.output_ids),
            "cached_tokens": state.cached_tokens,
            "weight_version": self._weights,
        }
        if state.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._began
        meta |= {name: growing.shown() for name, growing in self._lists.items()}
        return {"text": "".join(self._text), "output_ids": list(state.output_ids), "meta_info": meta}

    def _extend(self, of: str, entries: list[TokenLogprob]) -> None:
        self._lists[f"{of}_token_logprobs"].extend(map(self._entry, entries))
        if self._top > 0:
            self._lists[f"{of}_top_logprobs"].extend(map(self._alternatives, entries))

    def _entry(self, entry: TokenLogprob) -> Entry:
        return entry.logprob, entry.token_id, entry.data.decode("utf-8", "replace") if self._with_text else None

    def _alternatives(self, entry: TokenLogprob) -> list[Entry] | None:
        """None where nothing is predicted: at the first token of a prompt."""
        if entry.logprob is None:
            return None
        texts = [data.decode("utf-8", "replace") if self._with_text else None for data in entry.top_data] or [None] * len(entry.top)
        return [(logprob, id, text) for (id, logprob), text in zip(entry.top, texts, strict=True)]


def finish_reason(finish: Finish | None, tokens: int) -> dict[str, Any] | None:
    """`{"type": "stop", "matched": id or string}`, `{"type": "length", "length": n}`, None while it runs."""
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": tokens}
    return {"type": finish.reason, "matched": finish.matched}
