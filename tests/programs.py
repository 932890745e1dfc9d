"""Runs a checkpoint's native program by hand, as tests/stepping.py does for the torch runner."""

from __future__ import annotations

from typing import Any

from llmd.kernels.llama import record_llama
from llmd.kernels.program import Pool, Program, Shape
from llmd.kernels.steps import Steps as ProgramSteps
from llmd.model.native_loader import NativeModel, load_native
from llmd.plan.spec import Boot
from tests.stepping import Steps


def load(boot: Boot) -> NativeModel:
    return load_native(boot, lambda stage, done, total: None)


def program_of(model: NativeModel, *, pool: Pool, slots: int, sampled_ids: int, kv_type: str = "float32", page_size: int = 16, **shape: Any) -> Program:
    """The recorded program with an empty cache."""
    config = model.config
    program = Program(
        pool,
        Shape(
            hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim, layers=config.num_layers,
            vocab=config.vocab_size, sampled_ids=sampled_ids, kv_type=kv_type, page_size=page_size, rope_scale=model.rope_scale, **shape,
        ),
        model.frequencies,
    )  # fmt: skip
    record_llama(program, config, model.matrices, model.vectors)
    program.set_cache(slots)
    return program


class ProgramStepper(Steps):
    """The native program's; `page_size` 1 makes it gather every slot."""

    def __init__(
        self, model: NativeModel, *, threads: int = 1, kv_type: str = "float32", sampled_ids: int = 261, page_size: int = 16, shape: Any = None, **pool: Any
    ) -> None:
        super().__init__(page_size=page_size, **pool)
        self.pool = Pool(threads)
        self.program = program_of(model, pool=self.pool, slots=self.slots, sampled_ids=sampled_ids, kv_type=kv_type, page_size=page_size, **(shape or {}))
        self.runner = ProgramSteps(self.program)
