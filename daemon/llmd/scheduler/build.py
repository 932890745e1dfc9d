"""Loads the model, sizes the KV pool to what memory is left, and makes the runner over it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmd import failpoints
from llmd.config import ServerArgs
from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError
from llmd.memory.budget import AUTO_RUNNING_REQUESTS, KvBudget, KvRequest, native_kv_bytes, plan_kv
from llmd.memory.host import may_have_gpu, read_host_memory
from llmd.memory.pools import ReqToTokenPool, TokenToKVPoolAllocator
from llmd.memory.radix_cache import RadixCache
from llmd.model import native
from llmd.model.batch import Runner
from llmd.plan.spec import Boot
from llmd.scheduler.ahead import Ahead
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
    ahead: Ahead | None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What budget and status need to know of a loaded model."""

    kv_bytes_per_token: int
    device: str
    weights_bytes: int
    dtype: str
    kv_cache_dtype: str
    quantization: str
    kernels: str = "torch"


def build(boot: Boot, progress: Progress) -> Built:
    """Load, measure, allocate. Raises ConfigError when the KV pool can't hold one request of full context."""
    began = time.monotonic()
    free_before = read_host_memory().free
    facts, make_runner = _load(boot, progress)
    progress("KV cache", 0, 0)
    failpoints.hit("scheduler.kv")
    args = boot.args
    max_running = AUTO_RUNNING_REQUESTS if args.memory.max_running_requests == "auto" else args.memory.max_running_requests
    budget = _budget(boot, facts, max_running, free_before)
    cache = RadixCache(budget.page_size, args.scheduler.eviction) if args.scheduler.radix_cache else None
    rows, pages = ReqToTokenPool(max_running, budget.context_length), TokenToKVPoolAllocator(budget.pages, budget.page_size)
    kv = KvManager(rows, pages, cache, boot.files.weights_version)
    runner = make_runner(kv)
    ahead = _ahead(args, pages, facts, runner)
    load_s = time.monotonic() - began
    computed_by = "torch" if facts.kernels == "torch" else f"{facts.kernels} kernels"
    pool = f"{budget.tokens} tokens of KV in {budget.pages} pages, {budget.kv_bytes / 2**20:.0f} MiB ({budget.explain})"
    log.info("model loaded in %.2f s, computed by %s: %s", load_s, computed_by, pool)
    return Built(runner, kv, budget.context_length, max_running, _info(args, facts, budget, max_running) | {"load_s": round(load_s, 3)}, ahead)


def _load(boot: Boot, progress: Progress) -> tuple[_Facts, Callable[[KvManager], Runner]]:
    """The facts, and what makes the runner once the pools are there."""
    progress("weights", 0, 0)
    failpoints.hit("scheduler.weights")
    if boot.files.kind == "dummy":
        facts = _Facts(KV_BYTES_PER_TOKEN, "cpu", 0, "int32", "int32", "none")
        return facts, lambda kv: DummyRunner(kv.pages.num_slots, boot.files.vocab_size)
    if not _on_gpu(boot.args.model):
        reason = native.why_not()
        if reason is None:
            return _load_native(boot, progress)
        if faults := native.needs_native(boot.args.model, reason):
            raise ConfigError(faults)
        log.warning("torch computes this model, not the native kernels, which are several times faster: %s", reason)
    return _load_torch(boot, progress)


def _on_gpu(args: ModelArgs) -> bool:
    """Whether torch is to find a GPU. torch is only asked where there is a driver: its import takes longer than everything else here."""
    if args.device != "auto" or not may_have_gpu():
        return args.device == "cuda"
    import torch

    return bool(torch.cuda.is_available())


def _load_native(boot: Boot, progress: Progress) -> tuple[_Facts, Callable[[KvManager], Runner]]:
    from llmd.model.native_loader import load_native
    from llmd.model.native_runner import NativeRunner

    args = boot.args.model
    model = load_native(boot, progress)
    kv_dtype = native.kv_dtype(args)
    each = native_kv_bytes(model.config.kv_vectors_per_token, model.config.kv_values_per_token, kv_dtype)
    facts = _Facts(each, "cpu", model.weights_bytes, model.dtype, kv_dtype, model.quantization, native.kernels_name())
    threads = 1 if args.threads == "auto" else args.threads

    def runner(kv: KvManager) -> NativeRunner:
        slots, size = kv.pages.num_slots, boot.files.tokenizer_size
        told = (lambda done: progress("KV cache", done, slots * each)) if boot.args.memory.preallocate is True else None
        return NativeRunner(model, slots, kv.pages.page_size, kv_dtype, threads, size, _places(threads), preallocate=told)

    return facts, runner


def _places(threads: int) -> list[int]:
    """Where compute threads stay: each on a CPU of its own where there is one for each. Left to the system, two of them may share one while another idles."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus if threads == len(cpus) > 1 else []


def _load_torch(boot: Boot, progress: Progress) -> tuple[_Facts, Callable[[KvManager], Runner]]:
    import torch

    from llmd.model.loader import load_model
    from llmd.model.runner import ModelRunner
    from llmd.sampling.sampler import Sampler

    torch.set_flush_denormal(True)  # numbers this small change no token, and slow a CPU down a hundredfold
    model = load_model(boot, progress)
    dtype, kv_dtype = (str(kind).removeprefix("torch.") for kind in (model.dtype, model.kv_dtype))
    facts = _Facts(model.kv_bytes_per_token, str(model.device), model.weights_bytes, dtype, kv_dtype, model.quantization)
    return facts, lambda kv: ModelRunner(model, kv.pages.num_slots, Sampler(boot.files.tokenizer_size), preallocate=boot.args.memory.preallocate is True)


def _ahead(args: ServerArgs, pages: TokenToKVPoolAllocator, facts: _Facts, runner: Runner) -> Ahead | None:
    if args.memory.preallocate != "auto" or facts.kernels == "torch":
        return None
    from llmd.model.native_runner import NativeRunner

    assert isinstance(runner, NativeRunner)
    size = pages.page_size
    return Ahead(pages, size * facts.kv_bytes_per_token, lambda begin, end: runner.take(begin * size, end * size))


def _budget(boot: Boot, facts: _Facts, max_running: int, free_before: int) -> KvBudget:
    args = boot.args
    on_gpu = facts.device.startswith("cuda")
    fraction = args.memory.mem_fraction_static
    free_before, free_after = _gpu_memory(facts) if on_gpu else (free_before, read_host_memory().free)
    budget = plan_kv(
        KvRequest(
            kv_bytes_per_token=facts.kv_bytes_per_token,
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


def _gpu_memory(facts: _Facts) -> tuple[int, int]:
    """(free before the weights, free now) on the model's GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(facts.device))
    return free + facts.weights_bytes, free


def _info(args: ServerArgs, facts: _Facts, budget: KvBudget, max_running: int) -> dict[str, Any]:
    return {
        "kv": {"page_size": budget.page_size, "pages_total": budget.pages, "bytes": budget.kv_bytes, "budget": budget.explain},
        "max_running_requests": max_running,
        "context_length": budget.context_length,
        "max_total_tokens": budget.tokens,
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "kv_cache_dtype": facts.kv_cache_dtype,
        "device": facts.device,
        "kernels": facts.kernels,
        "weights_bytes": facts.weights_bytes,
        "threads": args.model.threads,
    }
