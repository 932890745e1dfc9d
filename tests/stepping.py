"""A model runner driven by hand: slots given out in a shuffled order, requests extended token by token or chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmd.model import native
from llmd.model.batch import EmbedRequest, ForwardBatch, Runner, SampleRequest, SampleResult
from llmd.model.loader import LoadedModel, load_model
from llmd.model.native_loader import NativeModel, load_native
from llmd.model.native_runner import NativeRunner
from llmd.model.runner import ModelRunner
from llmd.plan.spec import Boot
from llmd.sampling.sampler import Sampler
from llmd.wire.messages import SamplingParams


class Steps:
    """Rows 1..requests of a small pool whose pages are out of order; a subclass brings the runner."""

    runner: Runner

    def __init__(self, *, requests: int = 8, context: int = 256, seed: int = 0, page_size: int = 1) -> None:
        pages = requests * context // page_size
        order = np.random.default_rng(seed).permutation(np.arange(1, pages + 1)).astype(np.int32)
        slots = order[:, None] * page_size + np.arange(page_size, dtype=np.int32)
        self.slots = (pages + 1) * page_size
        self.req_to_token = np.zeros((requests + 1, context), dtype=np.int32)
        self.req_to_token[1:] = slots.reshape(requests, context)
        self.lengths = np.zeros(requests + 1, dtype=np.int64)

    def step(self, new: dict[int, list[int]], **wanted: Any) -> dict[int, SampleResult]:
        """One forward pass that appends `new` tokens to each row; the next token of each, greedily unless told otherwise. `wanted` goes into SampleRequest."""
        wanted.setdefault("sampling", SamplingParams(max_new_tokens=1, temperature=0.0))
        requests = [SampleRequest(row=index, position=0, **wanted) for index in range(len(new))]
        return dict(zip(new, self.runner.step(self.batch(new), requests), strict=True))

    def embed(self, new: dict[int, list[int]], embeds: list[EmbedRequest], wanted: Sequence[SampleRequest] = ()) -> list[SampleResult]:
        """The same, which also sets the vectors of `embeds`."""
        batch = self.batch(new)
        batch.embeds = embeds
        return self.runner.step(batch, list(wanted))

    def batch(self, new: dict[int, list[int]]) -> ForwardBatch:
        """The step that appends `new` tokens to each row; the rows are that much longer from here on."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row, tokens in new.items():
            start = int(self.lengths[row])
            self.lengths[row] += len(tokens)
            ids += tokens
            positions += range(start, start + len(tokens))
            slots += self.req_to_token[row, start : start + len(tokens)].tolist()
        rows = np.array(list(new), dtype=np.int64)
        return ForwardBatch(
            input_ids=np.array(ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            out_cache_loc=np.array(slots, dtype=np.int64),
            req_pool_indices=rows,
            seq_lens=self.lengths[rows],
            extend_lens=np.array([len(tokens) for tokens in new.values()], dtype=np.int64),
            req_to_token=self.req_to_token,
        )

    def prompt_logprobs(self, row: int, ids: list[int]) -> list[float]:
        """Log-probability of each id but the first, the prompt computed in one step."""
        found = self.step({row: ids}, logprobs=0, prompt_logprob_ids=ids[1:])[row].prompt_logprobs
        assert found is not None
        return [value for value, _ in found]


class Stepper(Steps):
    """The torch runner's."""

    def __init__(self, boot: Boot, *, tokenizer_size: int | None = None, **pool: Any) -> None:
        super().__init__(**pool)
        self.model: LoadedModel = load_model(boot, lambda stage, done, total: None)
        self.runner: ModelRunner = ModelRunner(self.model, self.slots, Sampler(tokenizer_size or boot.files.tokenizer_size))


class NativeStepper(Steps):
    """The native runner's."""

    def __init__(self, boot: Boot, *, tokenizer_size: int | None = None, **pool: Any) -> None:
        super().__init__(**pool)
        args = boot.args.model
        assert isinstance(args.threads, int)
        self.model: NativeModel = load_native(boot, lambda stage, done, total: None)
        size = tokenizer_size or boot.files.tokenizer_size
        self.runner: NativeRunner = NativeRunner(self.model, self.slots, int(pool.get("page_size", 1)), native.kv_dtype(args), args.threads, size)
