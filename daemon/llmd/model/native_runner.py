"""`NativeRunner`: steps of a packed model by the native kernels, each one call without the interpreter lock. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmd.kernels.llama import record_llama
from llmd.kernels.program import Pool, Program, Shape
from llmd.kernels.steps import Steps
from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.model.native_loader import NativeModel


class NativeRunner:
    """Implements `llmd.model.batch.Runner`. Called by one thread at a time. Holds the threads, the KV cache and the recorded step."""

    def __init__(
        self,
        model: NativeModel,
        num_slots: int,
        page_size: int,
        kv_dtype: str,
        threads: int,
        tokenizer_size: int,
        cpus: Sequence[int] = (),
        *,
        preallocate: Callable[[int], None] | None = None,
    ) -> None:
        """`num_slots`: token slots of the KV pool, page 0 included; its memory is taken as tokens come to lie in it, or now, with
        `preallocate` told how many bytes are there. `cpus`: where the threads stay."""
        config = model.config
        self.model = model
        self.pool = Pool(threads, cpus)
        shape = Shape(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layers=config.num_layers,
            vocab=config.vocab_size,
            sampled_ids=min(tokenizer_size, config.vocab_size),
            kv_type=kv_dtype,
            page_size=page_size,
            rope_scale=model.rope_scale,
        )
        self.program = Program(self.pool, shape, model.frequencies)
        record_llama(self.program, config, model.matrices, model.vectors)
        self.program.set_cache(num_slots)
        if preallocate is not None:
            self.program.preallocate(preallocate)
        self._steps = Steps(self.program)

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        """See Runner. Raises KernelError for a step that contradicts itself."""
        return self._steps.step(batch, wanted)

    def take(self, begin: int, end: int) -> None:
        """Make the memory of token slots begin..end (exclusive), which no token has lain in, be there. Not while a step runs."""
        self.program.take(begin, end)

    def close(self) -> None:
        """Give back cache and threads."""
        self.program.close()
        self.pool.close()
