"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
import math
from typing import Any

from msgspec import Raw

from llmd.frontend.replies import dumps
from llmd.wire.messages import TokenLogprob

#: JSON has no -Infinity; OpenAI gives this for a token that cannot be.
_LOWEST = -9999.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def _entry(token_id: int, data: bytes, logprob: float | None, as_ids: bool) -> dict[str, Any]:
    name = f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
    return {"token": name, "logprob": None if logprob is None else _finite(logprob), "bytes": list(data)}


def chat_logprobs(entries: list[TokenLogprob], top: int, *, as_ids: bool = False) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk, with `top` alternatives for each token at most. Each token is JSON already: many as objects are slow."""
    content = []
    for entry in entries:
        others = [_entry(id, data, logprob, as_ids) for (id, logprob), data in zip(entry.top[:top], entry.top_data, strict=False)]
        content.append(Raw(dumps({**_entry(entry.token_id, entry.data, entry.logprob, as_ids), "top_logprobs": others})))
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: list[TokenLogprob], top: int) -> list[Raw | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first, its own and the `top` likeliest by id. A `rank` beyond them is null."""
    return [_ranked(entry, top) for entry in entries]


def _ranked(entry: TokenLogprob, top: int) -> Raw | None:
    if entry.logprob is None:
        return None
    ids = [id for id, _ in entry.top[:top]]
    found = {entry.token_id: (entry.logprob, ids.index(entry.token_id) + 1 if entry.token_id in ids else None, entry.data)}
    for rank, ((id, logprob), data) in enumerate(zip(entry.top[:top], entry.top_data, strict=False), 1):
        found[id] = (logprob, rank, data)
    shown = {str(id): {"logprob": _finite(lp), "rank": rank, "decoded_token": data.decode("utf-8", "replace")} for id, (lp, rank, data) in found.items()}
    return Raw(dumps(shown))


class TextLogprobs:
    """`logprobs` of one text choice, chunk by chunk: offsets go on counting characters, also within a character split over tokens.

    `top`: how many alternatives are wanted; with none there is no `top_logprobs`.
    """

    def __init__(self, top: int, *, as_ids: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The object for the next entries."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.data))
        return {
            "tokens": [self._name(entry.token_id, entry.data) for entry in entries],
            "token_logprobs": [None if e.logprob is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top = {self._name(id, data): _finite(lp) for (id, lp), data in zip(entry.top[: self._top], entry.top_data, strict=False)}
        top.setdefault(self._name(entry.token_id, entry.data), _finite(entry.logprob))
        return top

    def _name(self, id: int, data: bytes) -> str:
        return f"token_id:{id}" if self._as_ids else _text(data)


def _text(data: bytes) -> str:
    """A token's text; bytes that are no text on their own as `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
