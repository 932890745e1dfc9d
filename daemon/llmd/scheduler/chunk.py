"""`ChunkSizer`: how many prompt tokens one step computes, so that the streams beside it keep their pace.

`scheduler.chunked_prefill_size` fixes it. `auto` learns from the steps themselves what a step of so many streams takes without a
prompt, and what each prompt token adds; with streams running it takes as many as stretch a step to STRETCH times its length.
"""

from __future__ import annotations

#: With the noise of real steps this keeps the 99th percentile of the gaps between tokens under three times the normal gap.
STRETCH = 2.0
#: Smaller chunks cost more than they spare: each step reads all weights.
LEAST = 16
MOST = 2048
#: Nothing is measured yet: alone, and beside streams.
FIRST_ALONE, FIRST_BESIDE = 512, 64
#: A step without streams still has to end soon, for what may arrive meanwhile.
LONGEST_STEP = 1.0
#: Weight of the newest step.
_NEW = 0.25


class ChunkSizer:
    """One per scheduler; told of each step."""

    def __init__(self, fixed: int | None) -> None:
        """`fixed`: tokens; None: auto."""
        self._fixed = fixed
        self._token_seconds: float | None = None
        self._step_seconds: dict[int, float] = {}
        """By bit length of the number of streams: a step without prompts."""

    def size(self, streams: int) -> int:
        """Prompt tokens for the next step, which `streams` requests share that are past their prompt."""
        if self._fixed is not None:
            return self._fixed
        step = self._step(streams)
        if self._token_seconds is None or (streams and step is None):
            return FIRST_BESIDE if streams else FIRST_ALONE
        seconds = (STRETCH - 1) * step if streams and step is not None else LONGEST_STEP
        return max(LEAST, min(MOST, int(seconds / self._token_seconds)))

    def observe(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """A step took so long. What a prompt token costs includes its share of all that a step with prompts costs more."""
        if not prompt_tokens:
            self._step_seconds[streams.bit_length()] = _mean(self._step_seconds.get(streams.bit_length()), seconds)
        elif not streams or self._step(streams) is not None:
            self._token_seconds = _mean(self._token_seconds, max(1e-7, (seconds - (self._step(streams) or 0.0)) / prompt_tokens))

    def _step(self, streams: int) -> float | None:
        """A step of so many streams, or of the next best number of them that is known; None with none, or when none is known."""
        if not streams or not self._step_seconds:
            return None
        bits = streams.bit_length()
        return self._step_seconds[min(self._step_seconds, key=lambda known: abs(known - bits))]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (new - old)
