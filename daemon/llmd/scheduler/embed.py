"""Texts to embed: in queue, batch and KV they are requests that generate nothing; what is theirs alone is here.

The runner pools the tokens of one step; `Pool` puts the parts together, and makes the vector that the client gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmd.wire.messages import Pooling, SamplingParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

_NOTHING = SamplingParams(max_new_tokens=0)


@dataclass(slots=True)
class Pool:
    """What one text's vector is made of."""

    pooling: Pooling
    dimensions: int
    """0: all."""
    total: npt.NDArray[np.float64] | None = None

    @property
    def reads_all(self) -> bool:
        """Whether each token has to be computed, also where its KV is known: of known ones there is no hidden state."""
        return self.pooling != "last"

    def wants(self, *, first: bool, last: bool) -> bool:
        """Whether a part of the text is to be pooled: one that begins it, ends it, or neither. The last one always is, for `mean` all are."""
        return last or self.pooling == "mean" or (first and self.pooling == "cls")

    def add(self, part: npt.NDArray[np.float32], *, first: bool) -> None:
        """Take in a part. A first one begins anew: the text has lost its KV and is computed again."""
        if first or self.total is None or self.pooling == "last":
            self.total = part.astype(np.float64)
        elif self.pooling == "mean":
            self.total += part

    def vector(self) -> bytes | None:
        """float32 of length 1, cut to `dimensions` before; None where it is not finite. The mean needs no division: only its direction is left."""
        assert self.total is not None, "a vector is asked for after its last part"
        kept = self.total[: self.dimensions] if self.dimensions else self.total
        norm = float(np.linalg.norm(kept))
        if not np.isfinite(norm):
            return None
        return (kept / norm if norm > 0 else kept).astype("<f4").tobytes()


def as_request(source: TokenizedEmbeddingReqInput) -> TokenizedGenerateReqInput:
    """The same text as a request that generates nothing."""
    return TokenizedGenerateReqInput(
        rid=source.rid,
        frontend=source.frontend,
        incarnation=source.incarnation,
        epoch=source.epoch,
        input_ids=source.input_ids,
        sampling=_NOTHING,
        priority=source.priority,
        debug_text=source.debug_text,
    )
