"""`ChunkSizer`: how many prompt tokens one step computes, so that the streams beside it keep their pace.

`scheduler.chunked_prefill_size` fixes it. `auto` is a feedback control, which needs no model of the machine: a step of running
streams that also carries prompt tokens shall take STRETCH times what it takes without. A step that took longer cuts the next chunk
at once, one that took less lets it grow slowly; so a wrong guess costs a few steps, not the pace of a whole prompt.
"""

from __future__ import annotations

#: With the noise of real steps this keeps the 99th percentile of the gaps between tokens under three times the normal gap.
STRETCH = 2.0
#: Smaller chunks cost more than they spare: each step reads all weights.
LEAST = 16
MOST = 2048
#: Nothing is measured yet: alone, and beside streams.
FIRST_ALONE, FIRST_BESIDE = 512, 32
#: Kernels compute so many rows at once: what is free in the last of such blocks costs nothing.
ROW_BLOCK = 16
#: A step without streams still has to end soon, for what may arrive meanwhile.
LONGEST_STEP = 1.0
#: The next chunk is at least and at most so much of the last one.
SHRINK, GROW = 0.5, 1.25
#: A chunk whose step is so near the goal stays.
_NEAR = (0.85, 1.05)
#: Weight of the newest step in a mean, and how far from the mean a step counts: one that the machine held up tells nothing.
_NEW, _FAR = 0.25, (0.8, 1.2)
#: A shorter prompt tells little of what a token costs.
_TELLING = 64


class ChunkSizer:
    """One per scheduler; told of each step. What it learns it keeps by the number of streams, in powers of two."""

    def __init__(self, fixed: int | None) -> None:
        """`fixed`: tokens; None: auto."""
        self._fixed = fixed
        self._token_seconds: float | None = None
        """What a token costs in steps without streams."""
        self._step_seconds: dict[int, float] = {}
        """Steps without prompts."""
        self._sizes: dict[int, float] = {}
        """Chunks beside streams."""

    def size(self, streams: int) -> int:
        """Prompt tokens for the next step, which `streams` requests share that are past their prompt."""
        if self._fixed is not None:
            return self._fixed
        if streams:
            return _filled(int(_nearest(self._sizes, streams) or FIRST_BESIDE), streams)
        if self._token_seconds is None:
            return FIRST_ALONE
        return max(LEAST, min(MOST, int(LONGEST_STEP / self._token_seconds)))

    def observe(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if not prompt_tokens:
            self._step_seconds[streams.bit_length()] = _mean(self._step_seconds.get(streams.bit_length()), seconds)
        elif streams:
            self._steer(streams, prompt_tokens, seconds)
        elif prompt_tokens >= _TELLING:
            self._token_seconds = _mean(self._token_seconds, seconds / prompt_tokens)

    def _steer(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """Set the next chunk by how far this step was from the goal; the short end of a prompt tells nothing."""
        step = _nearest(self._step_seconds, streams)
        if step is None or prompt_tokens < 0.75 * self.size(streams):
            return
        factor = (STRETCH - 1) * step / max(1e-9, seconds - step)
        if not _NEAR[0] <= factor <= _NEAR[1]:
            wanted = prompt_tokens * max(SHRINK, min(GROW, factor))
            self._sizes[streams.bit_length()] = max(LEAST, min(MOST, wanted))


def _filled(size: int, streams: int) -> int:
    """So many prompt tokens, and those that the last block of rows has still room for."""
    return -(-(size + streams) // ROW_BLOCK) * ROW_BLOCK - streams


def _nearest(known: dict[int, float], streams: int) -> float | None:
    """What is known for so many streams, or for the next best number of them."""
    bits = streams.bit_length()
    return known[min(known, key=lambda other: abs(other - bits))] if known else None


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (max(_FAR[0] * old, min(_FAR[1] * old, new)) - old)
