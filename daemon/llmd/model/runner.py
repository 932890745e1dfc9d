"""`ModelRunner`: one step of a loaded model: forward pass over the paged KV, logits where they are wanted, sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from llmd.model.attention import TorchAttention
from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.model.kv_cache import KVCache
from llmd.model.loader import LoadedModel
from llmd.sampling.sampler import Sampler
from llmd.wire.messages import Pooling

#: Rows of logits made at once for prompt logprobs; each is a float32 for each id of the vocabulary.
PROMPT_ROWS = 128


class ModelRunner:
    """Implements `llmd.model.batch.Runner`. Called by one thread."""

    def __init__(self, model: LoadedModel, num_slots: int, sampler: Sampler, *, preallocate: bool = False) -> None:
        """`num_slots`: token slots of the KV pool, page 0 included; `preallocate`: its memory is taken now."""
        self._model = model.module
        self._device = model.device
        self._sampler = sampler
        self.cache = KVCache(model.config, num_slots, model.kv_dtype, model.device, preallocate=preallocate)
        self._attention = TorchAttention(model.config, self.cache, model.device)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        """See Runner."""
        self._attention.plan(batch)
        ids = torch.from_numpy(batch.input_ids).to(self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        hidden = self._model.hidden(ids, positions, self._attention)
        ends = np.cumsum(batch.extend_lens)
        for embed in batch.embeds:
            end = int(ends[embed.row])
            embed.vector = self._pool(hidden[end - int(batch.extend_lens[embed.row]) : end], embed.pooling)
        if not wanted:
            return []
        last = ends[[request.row for request in wanted]] - 1
        rows = hidden if len(last) == len(hidden) and np.array_equal(last, np.arange(len(hidden))) else hidden[torch.from_numpy(last).to(self._device)]
        results = self._sampler.sample(self._model.logits(rows), wanted)
        for request, result in zip(wanted, results, strict=True):
            if request.prompt_logprob_ids:
                start = int(ends[request.row] - batch.extend_lens[request.row])
                result.prompt_logprobs = self._prompt_logprobs(hidden[start : start + len(request.prompt_logprob_ids)], request)
        return results

    def _pool(self, hidden: torch.Tensor, pooling: Pooling) -> npt.NDArray[np.float32]:
        """float32 [hidden] of one request's new tokens; see EmbedRequest."""
        if pooling == "mean":
            return self._model.final_norm(hidden).double().sum(0).float().cpu().numpy()
        return self._model.final_norm(hidden[-1:] if pooling == "last" else hidden[:1])[0].float().cpu().numpy()

    def _prompt_logprobs(self, hidden: torch.Tensor, request: SampleRequest) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        found: list[tuple[float, tuple[tuple[int, float], ...]]] = []
        ids = request.prompt_logprob_ids
        for start in range(0, len(ids), PROMPT_ROWS):
            part = slice(start, start + PROMPT_ROWS)
            found += self._sampler.prompt_logprobs(self._model.logits(hidden[part]), ids[part], max(request.logprobs, 0))
        return found
