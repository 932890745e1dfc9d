"""Token counts of one request, as `usage` and the metrics give them: each prompt once, and only tokens that were delivered."""

from __future__ import annotations

from typing import Any

from llmd.frontend.req_state import Generation


class Usage:
    """Counts of a Generation whose choices are `n` for each prompt, in order."""

    def __init__(self, prompt_lengths: list[int], n: int) -> None:
        self._n = n
        self.prompt_tokens = sum(prompt_lengths)
        self.completion_tokens = 0
        self._cached = 0

    def settle(self, generation: Generation | None) -> None:
        """Take the counts from a Generation that is over."""
        if generation is None:
            return
        self.completion_tokens = sum(len(choice.output_ids) for choice in generation.choices)
        self._cached = sum(choice.cached_tokens for choice in generation.choices[:: self._n])

    def body(self) -> dict[str, Any]:
        """The `usage` object."""
        return {**self.counts(self.completion_tokens), "prompt_tokens_details": {"cached_tokens": self._cached}}

    def counts(self, completion_tokens: int) -> dict[str, Any]:
        """The same without details, after so many tokens of output."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": self.prompt_tokens + completion_tokens}
