"""The scripted runner of the model `dummy`: token i of the output is token i of the prompt, over and over. No weights, no torch.

It keeps the token ids themselves as its KV and reads them back through `req_to_token`, so a slip in the scheduler's
bookkeeping changes what comes out. A prompt that holds the end-of-sequence token makes the output end there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmd.model.batch import EmbedRequest, ForwardBatch, SampleRequest, SampleResult

KV_BYTES_PER_TOKEN = 4
#: Numbers in a vector.
HIDDEN = 32
#: Log-probability given to whatever the script does not say.
_UNLIKELY = -100.0


class DummyRunner:
    """Implements llmd.model.batch.Runner."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._kv = np.zeros(num_slots, dtype=np.int32)
        self._vocab_size = vocab_size

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        """Store the new tokens, then answer with the token the prompt has at the wanted position."""
        self._kv[batch.out_cache_loc] = batch.input_ids
        for embed in batch.embeds:
            embed.vector = self._pool(batch, embed)
        return [self._sample(batch, request) for request in wanted]

    def _sample(self, batch: ForwardBatch, request: SampleRequest) -> SampleResult:
        row, length = batch.req_pool_indices[request.row], int(batch.seq_lens[request.row])
        prompt = length - request.position
        token = int(self._kv[batch.req_to_token[row, request.position % prompt]])
        while token in request.banned_ids:
            token = (token + 1) % self._vocab_size
        result = SampleResult(token)
        if request.logprobs >= 0:
            result.logprob, result.top = 0.0, self._alternatives(token, request.logprobs)
        if request.prompt_logprob_ids:
            result.prompt_logprobs = [(0.0, self._alternatives(token, max(0, request.logprobs))) for token in request.prompt_logprob_ids]
        return result

    def _pool(self, batch: ForwardBatch, embed: EmbedRequest) -> npt.NDArray[np.float32]:
        """A token's state is a wave of its own frequency."""
        row, length, new = batch.req_pool_indices[embed.row], int(batch.seq_lens[embed.row]), int(batch.extend_lens[embed.row])
        tokens = self._kv[batch.req_to_token[row, length - new : length]]
        chosen = {"last": tokens[-1:], "cls": tokens[:1], "mean": tokens}[embed.pooling]
        return np.cos(np.outer(chosen + 1, np.arange(HIDDEN))).sum(0).astype(np.float32)

    def _alternatives(self, token: int, count: int) -> tuple[tuple[int, float], ...]:
        """The token itself, then its neighbours."""
        return tuple(((token + i) % self._vocab_size, _UNLIKELY if i else 0.0) for i in range(min(count, self._vocab_size)))
