"""What a scheduler hands to a runner for one step, and what it gets back. numpy only: the scripted runner needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmd.wire.messages import Pooling, SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class EmbedRequest:
    """One row of the batch whose new tokens' hidden states are pooled. A prompt that comes in chunks is pooled chunk by chunk."""

    row: int
    """Index into the batch's requests (B). No SampleRequest has the same one."""
    pooling: Pooling
    vector: npt.NDArray[np.float32] | None = None
    """Set by the runner, [hidden]: of the hidden states after the final norm, that of the row's last new token (`last`) or of its
    first one (`cls`), or the sum of all (`mean`, added up in float64)."""


@dataclass(slots=True)
class ForwardBatch:
    """One step over B requests with T new tokens in all; decode and (chunked) prefill may be mixed.

    Request b's new tokens are rows `sum(extend_lens[:b]) ...`; its KV slots are `req_to_token[req_pool_indices[b], :seq_lens[b]]`.
    """

    input_ids: Ints
    """[T] new token ids, request after request."""
    positions: Ints
    """[T] position of each new token in its sequence."""
    out_cache_loc: Ints
    """[T] KV slot (token index into the pool) that each new token's K and V go to."""
    req_pool_indices: Ints
    """[B] row of each request in `req_to_token`."""
    seq_lens: Ints
    """[B] tokens of each request including the new ones."""
    extend_lens: Ints
    """[B] new tokens of each request; 1 in decode."""
    req_to_token: npt.NDArray[np.int32]
    """The KV slots of each row's tokens; nobody changes what the batch's rows hold before the step is over."""
    embeds: list[EmbedRequest] = field(default_factory=list)
    """Rows to be pooled; usually none."""


@dataclass(slots=True)
class SampleRequest:
    """One row of the batch whose next token is wanted."""

    row: int
    """Index into the batch's requests (B)."""
    sampling: SamplingParams
    position: int
    """Index of the token to be sampled in the request's output, for (seed, position)."""
    logprobs: int = -1
    prompt_logprob_ids: list[int] = field(default_factory=list)
    """Where prompt logprobs are wanted: the token that follows each of this request's new tokens but the last."""
    banned_ids: tuple[int, ...] = ()
    """Never sampled in this step (min_new_tokens)."""
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    """The request's own list, the same in each step, read for penalties only: its first `position` tokens count. Where a step was
    prepared before the last one's result came, the last may not be in it yet; whoever chose it knows it."""


@dataclass(slots=True)
class SampleResult:
    """The sampled token of one SampleRequest."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] | None = None
    """(logprob, best alternatives) for each id of `prompt_logprob_ids`."""
    finite: bool = True
    """False: the logits held NaN or Inf; the request gets `non_finite_logits`."""


class Runner(Protocol):
    """A model with its KV tensors. One implementation per backend; the scheduler knows no more of it."""

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        """Run the forward pass (it writes the new KV), set the vectors of `batch.embeds`, and sample for `wanted`, in that order."""
        ...
