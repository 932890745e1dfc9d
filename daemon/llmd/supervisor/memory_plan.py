"""What the KV pool will be, planned before anything is loaded, from the model's header and the memory that is free now.

The scheduler plans again with what it has measured; this plan is there so that what cannot fit is said at once. On a GPU the free
memory is not known without its driver: then only what needs no memory figure is judged.
"""

from __future__ import annotations

import os
from typing import Final

from msgspec import Struct

from llmd.config import ServerArgs
from llmd.config.server_args import LEAST_CONTEXT
from llmd.errors import ConfigError
from llmd.memory.budget import AUTO_RUNNING_REQUESTS, KvBudget, KvRequest, native_kv_bytes, plan_kv
from llmd.memory.host import may_have_gpu, read_host_memory
from llmd.plan.spec import ModelFiles

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_DUMMY_BYTES: Final = 4
_UNLIMITED: Final = 2**60
_GPU: Final = "/dev/nvidiactl"


class MemoryPlan(Struct, frozen=True):
    """Bytes. `free` is None where the device's memory cannot be asked."""

    free: int | None
    weights: int
    """As they will lie in memory."""
    kv_bytes_per_token: int
    kv: KvBudget | None
    """None: not known before the weights are loaded."""


def plan_memory(args: ServerArgs, files: ModelFiles) -> MemoryPlan | None:
    """The plan for resolved `args`; None where the model's facts do not allow one. Raises ConfigError with settings that would work."""
    if not files.kv_values_per_token:
        return None
    on_gpu = args.model.device == "cuda" or (args.model.device == "auto" and files.kind != "dummy" and os.path.exists(_GPU))
    native = not on_gpu and files.native_bytes > 0
    weights = files.native_bytes if native else files.parameters * _BYTES.get(args.model.dtype, 4)
    each = _kv_bytes(args, files, native=native)
    if on_gpu:
        limited = args.memory.max_total_tokens is not None
        return MemoryPlan(None, weights, each, _plan_kv(_request(args, each, _UNLIMITED, _UNLIMITED)) if limited else None)
    free = read_host_memory().free
    if weights >= free:
        raise ConfigError(
            f"the weights of {files.name} take {weights / 2**20:.0f} MiB in memory, {free / 2**20:.0f} MiB are free and nothing is left for the KV cache: "
            "take a smaller model, set model.dtype: bfloat16, or free memory"
        )
    return MemoryPlan(free, weights, each, _plan_kv(_request(args, each, free, free - weights)))


def _plan_kv(request: KvRequest) -> KvBudget:
    """`plan_kv`; refuses a context that was clamped to nothing."""
    budget = plan_kv(request)
    if budget.context_length < LEAST_CONTEXT:
        raise ConfigError(
            f"memory.max_total_tokens: a KV pool of {budget.tokens} tokens leaves a context of {budget.context_length}; llmd serves {LEAST_CONTEXT} and more"
        )
    return budget


def _kv_bytes(args: ServerArgs, files: ModelFiles, *, native: bool) -> int:
    """Bytes of one token's K and V."""
    kind = args.model.kv_cache_dtype
    if native:
        return native_kv_bytes(files.kv_vectors_per_token, files.kv_values_per_token, "bfloat16" if kind == "auto" else kind)
    return files.kv_values_per_token * (_DUMMY_BYTES if files.kind == "dummy" else _BYTES.get(kind, 2))


def refuse_absent_gpu(args: ServerArgs) -> None:
    """Raise ConfigError where a GPU is asked for and no driver of one is there; the engine would find out only after its imports."""
    if args.model.device == "cuda" and not may_have_gpu():
        raise ConfigError(f"model.device: cuda: this machine has no GPU that can be used (there is no {_GPU}); set it to cpu or auto")


def describe(args: ServerArgs, plan: MemoryPlan) -> list[str]:
    """The plan in lines for `llmd check`."""
    free = "not known before the GPU is asked" if plan.free is None else f"{_mib(plan.free)} now"
    lines = [f"free       {free}", f"weights    {_mib(plan.weights)} in memory"]
    kv = plan.kv
    taken = ["           all of it is taken before llmd is ready (memory.preallocate: true)"] if args.memory.preallocate is True else []
    if kv is None:
        return [*lines, f"KV pool    {plan.kv_bytes_per_token} bytes a token; its size follows from what is free after loading", *taken]
    lines += [f"KV pool    {kv.tokens} tokens in {kv.pages} pages of {kv.page_size}, {_mib(kv.kv_bytes)} ({kv.explain})", *taken]
    clamped = f", clamped from {args.model.context_length}" if kv.clamped else ""
    lines.append(f"context    {kv.context_length} tokens a request{clamped}")
    if plan.free is not None:
        lines.append(f"left over  {_mib(plan.free - plan.weights - kv.kv_bytes)}")
    return lines


def _request(args: ServerArgs, each: int, free_before: int, free_after: int) -> KvRequest:
    memory = args.memory
    assert args.model.context_length is not None
    return KvRequest(
        kv_bytes_per_token=each,
        context_length=args.model.context_length,
        page_size=memory.page_size,
        max_running_requests=AUTO_RUNNING_REQUESTS if memory.max_running_requests == "auto" else memory.max_running_requests,
        free_before=free_before,
        free_after=free_after,
        mem_fraction_static=None if memory.mem_fraction_static == "auto" else memory.mem_fraction_static,
        max_total_tokens=memory.max_total_tokens,
        clamp_context=memory.clamp_context,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
