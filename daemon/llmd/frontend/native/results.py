"""Results in SGLang's shape: `{"text", "output_ids", "meta_info": {...}}`. Pieces go in, what there is so far comes out."""

from __future__ import annotations

import time
from typing import Any

from llmd.frontend.req_state import Delta, ReqState
from llmd.wire.messages import Finish, TokenLogprob

#: (logprob, token id, text or None): SGLang's entry.
Entry = tuple[float | None, int, str | None]


class Result:
    """One choice. Everything is cumulative, as in SGLang's streams."""

    def __init__(self, state: ReqState, *, name: str, weights_version: str, logprobs: int, logprob_start: int, with_text: bool) -> None:
        self._state = state
        self._name = name
        self._weights = weights_version
        self._top = logprobs
        self._start = logprob_start
        self._with_text = with_text
        self._began = time.monotonic()
        self._text: list[str] = []
        self._output: list[TokenLogprob] = []
        self._input: list[TokenLogprob] = []

    def add(self, delta: Delta) -> None:
        """Take in the next piece."""
        if delta.text:
            self._text.append(delta.text)
        self._output += delta.logprobs
        if delta.prompt_logprobs is not None and self._start >= 0:
            self._input = delta.prompt_logprobs[self._start :]

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
        if self._top >= 0:
            meta |= self._logprobs()
        return {"text": "".join(self._text), "output_ids": list(state.output_ids), "meta_info": meta}

    def _logprobs(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "input_token_logprobs": [self._entry(e) for e in self._input],
            "output_token_logprobs": [self._entry(e) for e in self._output],
        }
        if self._top > 0:
            found["input_top_logprobs"] = [self._alternatives(e) for e in self._input]
            found["output_top_logprobs"] = [self._alternatives(e) for e in self._output]
        return found

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
