"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
import math
from typing import Any

from llmd.wire.messages import TokenLogprob

#: JSON has no -Infinity; OpenAI gives this for a token that cannot be.
_LOWEST = -9999.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def _entry(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": None if logprob is None else _finite(logprob), "bytes": list(data)}


def chat_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk."""
    content = []
    for entry in entries:
        top = [_entry(data, logprob) for (_, logprob), data in zip(entry.top, entry.top_data, strict=False)]
        content.append({**_entry(entry.data, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`logprobs` of one text choice, chunk by chunk: offsets go on counting characters, also within a character split over tokens."""

    def __init__(self, with_top: bool) -> None:
        self._with_top = with_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The object for the next entries."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.data))
        return {
            "tokens": [_text(entry.data) for entry in entries],
            "token_logprobs": [None if e.logprob is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self._with_top else None,
            "text_offset": offsets,
        }

    @staticmethod
    def _top(entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top = {_text(data): _finite(logprob) for (_, logprob), data in zip(entry.top, entry.top_data, strict=False)}
        top.setdefault(_text(entry.data), _finite(entry.logprob))
        return top


def _text(data: bytes) -> str:
    """A token's text; bytes that are no text on their own as `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
