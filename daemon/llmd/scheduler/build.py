"""Loads the model, sizes the KV pool to what memory is left, and makes the runner over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from llmd.config import ServerArgs
from llmd.memory.budget import AUTO_RUNNING_REQUESTS, KvBudget, KvRequest, plan_kv
from llmd.memory.host import read_host_memory
from llmd.memory.pools import ReqToTokenPool, TokenToKVPoolAllocator
from llmd.model.batch import Runner
from llmd.plan.spec import Boot
from llmd.scheduler.dummy import KV_BYTES_PER_TOKEN, DummyRunner
from llmd.scheduler.kv import KvManager

log = logging.getLogger(__name__)

#: (stage, done, total)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A model ready to run, and what status shows of it."""

    runner: Runner
    kv: KvManager
    context_length: int
    max_running: int
    info: dict[str, Any]


class _Model(Protocol):
    """What is needed of a loaded model (llmd.model.loader.LoadedModel)."""

    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _DummyModel:
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    device: str = "cpu"
    weights_bytes: int = 0
    dtype: str = "int32"


def build(boot: Boot, progress: Progress) -> Built:
    """Load, measure, allocate. Raises ConfigError when the KV pool can't hold one request of full context."""
    began = time.monotonic()
    free_before = read_host_memory().free
    model = _load(boot, progress)
    progress("allocating KV cache", 0, 0)
    args = boot.args
    max_running = AUTO_RUNNING_REQUESTS if args.memory.max_running_requests == "auto" else args.memory.max_running_requests
    budget = _budget(boot, model, max_running, free_before)
    kv = KvManager(ReqToTokenPool(max_running, budget.context_length), TokenToKVPoolAllocator(budget.pages, budget.page_size))
    runner = _runner(boot, model, kv)
    load_s = time.monotonic() - began
    log.info("model loaded in %.2f s: %d tokens of KV in %d pages, %.0f MiB (%s)", load_s, budget.tokens, budget.pages, budget.kv_bytes / 2**20, budget.explain)
    info = _info(args, model, budget, max_running) | {"load_s": round(load_s, 3), "quantization": boot.files.quantization}
    return Built(runner, kv, budget.context_length, max_running, info)


def _load(boot: Boot, progress: Progress) -> _Model:
    if boot.files.kind == "dummy":
        return _DummyModel()
    from llmd.model.loader import load_model

    return load_model(boot, progress)


def _runner(boot: Boot, model: _Model, kv: KvManager) -> Runner:
    if isinstance(model, _DummyModel):
        return DummyRunner(kv.pages.num_slots, kv.rows.req_to_token, boot.files.vocab_size)
    from llmd.model.runner import ModelRunner
    from llmd.sampling.sampler import Sampler

    return ModelRunner(model, num_slots=kv.pages.num_slots, req_to_token=kv.rows.req_to_token, sampler=Sampler(boot.files.tokenizer_size))


def _budget(boot: Boot, model: _Model, max_running: int, free_before: int) -> KvBudget:
    args = boot.args
    on_gpu = model.device.startswith("cuda")
    fraction = args.memory.mem_fraction_static
    free_before, free_after = _gpu_memory(model) if on_gpu else (free_before, read_host_memory().free)
    budget = plan_kv(
        KvRequest(
            kv_bytes_per_token=model.kv_bytes_per_token,
            context_length=args.model.context_length or boot.files.context_length,
            page_size=args.memory.page_size,
            max_running_requests=max_running,
            free_before=free_before,
            free_after=free_after,
            on_gpu=on_gpu,
            mem_fraction_static=None if fraction == "auto" else fraction,
            max_total_tokens=args.memory.max_total_tokens,
            clamp_context=args.memory.clamp_context,
        )
    )
    if budget.clamped:
        log.warning("the context is clamped to %d tokens, which is what the KV pool holds (%s)", budget.context_length, budget.explain)
    return budget


def _gpu_memory(model: _Model) -> tuple[int, int]:
    """(free before the weights, free now) on the model's GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(model.device))
    return free + model.weights_bytes, free


def _info(args: ServerArgs, model: _Model, budget: KvBudget, max_running: int) -> dict[str, Any]:
    return {
        "kv": {"page_size": budget.page_size, "pages_total": budget.pages, "bytes": budget.kv_bytes, "budget": budget.explain},
        "max_running_requests": max_running,
        "context_length": budget.context_length,
        "max_total_tokens": budget.tokens,
        "dtype": model.dtype,
        "kv_cache_dtype": args.model.kv_cache_dtype,
        "device": model.device,
        "weights_bytes": model.weights_bytes,
        "threads": args.model.threads,
    }
