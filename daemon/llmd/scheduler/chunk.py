"""`ChunkSizer`: how many prompt tokens one step computes, so that the streams beside it keep their pace.

`scheduler.chunked_prefill_size` fixes it. `auto` is a feedback control, which needs no model of the machine: how long a step of running
streams may become for prompts' sake is a matter of how many wait for what (`longest_step`). A step that took longer cuts the next chunk at once, one
that took less lets it grow slowly; so a wrong guess costs a few steps, not the pace of a whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: What a step with streams may take, in steps without prompts. With the noise of real steps this keeps the 99th percentile of the gaps between tokens
#: under three times the normal gap.
STRETCH = 2.0
#: One request that waits for its first token counts as much as so many that wait for their next one.
PROMPT_WEIGHT = 8
#: Those who wait for their first token can make a step so long, where it would not be longer anyway: 10 tokens a second are still faster than one reads.
LONGEST_GAP = 0.1
#: Smaller chunks cost more than they spare: each step reads all weights.
LEAST = 16
MOST = 2048
#: Nothing is measured yet: alone, and beside streams.
FIRST_ALONE, FIRST_BESIDE = 512, 32
#: What a token is thought to cost beside streams, at first, of what it costs alone: chunks are smaller there.
DEARER_BESIDE = 2.0
#: Kernels compute so many rows at once: what is free in the last of such blocks costs nothing.
ROW_BLOCK = 16
#: A step without streams still has to end soon, for what may arrive meanwhile.
LONGEST_STEP = 1.0
#: The next chunk is at least and at most so much of the last one, while as many wait.
SHRINK, GROW = 0.5, 1.25
#: A chunk whose step is so near the goal stays.
_NEAR = (0.85, 1.05)
#: Weight of the newest step in a mean, and how far from the mean a step counts: one that the machine held up tells nothing.
_NEW, _FAR = 0.25, (0.8, 1.2)
#: A shorter prompt tells little of what a token costs.
_TELLING = 64
#: So much of a chunk, at least, was filled where it tells what a token costs: the short end of a prompt does not.
_FULL = 0.75


def longest_step(step: float, streams: int, prompts: int) -> float:
    """Seconds that a step of `streams` requests, which takes `step` without prompts, may take with tokens of `prompts` that wait for their first one."""
    fair = step * (1 + PROMPT_WEIGHT * prompts / streams)
    return max(STRETCH * step, min(fair, LONGEST_GAP))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step may have of prompts."""

    tokens: int
    longest: float | None = None
    """Seconds that the step should take with all of them; None: whatever they take."""
    each: float = 0.0
    """Seconds that each of them adds then."""


NO_CHUNK: Final = Chunk(0)


class ChunkSizer:
    """One per scheduler; told of each step. What it learns it keeps by the number of streams, in powers of two."""

    def __init__(self, fixed: int | None) -> None:
        """`fixed`: tokens; None: auto."""
        self._fixed = fixed
        self._token_seconds: float | None = None
        """What a token costs in steps without streams."""
        self._step_seconds: dict[int, float] = {}
        """Steps without prompts."""
        self._added_seconds: dict[int, float] = {}
        """What a token adds to steps with streams."""

    def next(self, streams: int, prompts: int = 1) -> Chunk:
        """For a step which `streams` requests share that are past their prompt, while `prompts` wait for their first token."""
        if self._fixed is not None:
            return Chunk(self._fixed)
        if streams:
            return self._beside(streams, prompts)
        if self._token_seconds is None:
            return Chunk(FIRST_ALONE)
        return Chunk(_within(LONGEST_STEP / self._token_seconds))

    def observe(self, streams: int, prompt_tokens: int, seconds: float, chunk: Chunk) -> None:
        """A step took so long, whose prompts might have had `chunk`."""
        if not prompt_tokens:
            self._step_seconds[streams.bit_length()] = _mean(self._step_seconds.get(streams.bit_length()), seconds)
        elif streams:
            self._steer(streams, prompt_tokens, seconds, chunk)
        elif prompt_tokens >= min(_TELLING, _FULL * chunk.tokens):
            self._token_seconds = _mean(self._token_seconds, seconds / prompt_tokens)

    def _beside(self, streams: int, prompts: int) -> Chunk:
        step, added = _nearest(self._step_seconds, streams), _nearest(self._added_seconds, streams)
        if step is None:
            return Chunk(_filled(FIRST_BESIDE, streams))
        if added is None and self._token_seconds is not None:
            added = DEARER_BESIDE * self._token_seconds
        longest = longest_step(step, streams, prompts)
        tokens = _filled(FIRST_BESIDE if added is None else _within((longest - step) / added), streams)
        return Chunk(tokens, longest, (longest - step) / tokens)

    def _steer(self, streams: int, prompt_tokens: int, seconds: float, chunk: Chunk) -> None:
        """Learn from how far this step was from its goal; the short end of a prompt tells nothing, unless the step was too long even so."""
        step = _nearest(self._step_seconds, streams)
        if step is None or chunk.longest is None:
            return
        if prompt_tokens < _FULL * chunk.tokens and not (seconds > chunk.longest and prompt_tokens >= ROW_BLOCK):
            return
        factor = chunk.each * prompt_tokens / max(1e-9, seconds - step)
        if not _NEAR[0] <= factor <= _NEAR[1]:
            self._added_seconds[streams.bit_length()] = chunk.each / max(SHRINK, min(GROW, factor))


def _within(tokens: float) -> int:
    return max(LEAST, min(MOST, int(tokens)))


def _filled(size: int, streams: int) -> int:
    """So many prompt tokens, and those that the last block of rows has still room for."""
    return -(-(size + streams) // ROW_BLOCK) * ROW_BLOCK - streams


def _nearest(known: dict[int, float], streams: int) -> float | None:
    """What is known for so many streams, or for the next best number of them."""
    bits = streams.bit_length()
    return known[min(known, key=lambda other: abs(other - bits))] if known else None


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (max(_FAR[0] * old, min(_FAR[1] * old, new)) - old)
