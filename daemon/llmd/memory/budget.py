"""How many KV pages there will be: a pure function of settings and measured numbers, the same in `llmd check` and at load.

On a CPU: KV for `max_running_requests` times min(context, 2,048) tokens, at least one full context, at most a quarter of the free memory. Where
`mem_fraction_static` is a number, and on a GPU: free after weights minus (1 - fraction) times free before. `max_total_tokens`
overrides both. A pool that cannot hold one request of full context is refused, or the context clamped where that is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmd.errors import ConfigError

AUTO_RUNNING_REQUESTS = 64
_AUTO_TOKENS_EACH = 2048
_AUTO_SHARE = 0.25
_GPU_FRACTION = 0.88
#: Numbers of a head come in such multiples in the native kernels' cache (kernels/src/kv.h).
KV_TILE = 16
#: Suggested values stay below what is free now by this factor.
_MARGIN = 0.9


def native_kv_bytes(vectors: int, values: int, dtype: str) -> int:
    """Bytes that one token takes in the native kernels' cache: `vectors` heads of `values` numbers in all, half of them keys, each padded to whole
    tiles. In int8 a key has scales of 4 bytes for each two tiles, a value one of 4."""
    size = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    tiles = -(-(values // vectors) // KV_TILE)
    return vectors * tiles * KV_TILE * size + (vectors // 2 * (4 * -(-tiles // 2) + 4) if dtype == "int8" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """What the budget depends on. Bytes unless said otherwise."""

    kv_bytes_per_token: int
    context_length: int
    page_size: int
    max_running_requests: int
    free_before: int
    """Free memory before the weights were loaded."""
    free_after: int
    """Free memory now."""
    on_gpu: bool = False
    mem_fraction_static: float | None = None
    """None: auto."""
    max_total_tokens: int | None = None
    clamp_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The KV pool. `explain` says in one line how it came about."""

    pages: int
    page_size: int
    context_length: int
    kv_bytes: int
    clamped: bool
    explain: str

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size


def plan_kv(request: KvRequest) -> KvBudget:
    """Size the KV pool. Raises ConfigError naming the settings, with values that work, when one request would not fit."""
    tokens, explain = _wanted_tokens(request)
    page_size = request.page_size
    pages = max(0, tokens // page_size)
    room = pages * page_size
    clamped = room < request.context_length
    if clamped and not (request.clamp_context and room >= page_size):
        raise ConfigError(_too_small(request, room, explain))
    if pages * page_size * request.kv_bytes_per_token > request.free_after:
        raise ConfigError(_too_large(request, room))
    return KvBudget(
        pages=pages,
        page_size=page_size,
        context_length=min(request.context_length, room),
        kv_bytes=(pages + 1) * page_size * request.kv_bytes_per_token,
        clamped=clamped,
        explain=explain,
    )


def _wanted_tokens(request: KvRequest) -> tuple[int, str]:
    each = request.kv_bytes_per_token
    if request.max_total_tokens is not None:
        return request.max_total_tokens, f"memory.max_total_tokens is {request.max_total_tokens}"
    fraction = request.mem_fraction_static
    if request.on_gpu or fraction is not None:
        fraction = _GPU_FRACTION if fraction is None else fraction
        budget = int(request.free_after - (1 - fraction) * request.free_before)
        return (
            budget // each,
            f"{_mib(request.free_after)} free after weights - (1 - {fraction:g}) x {_mib(request.free_before)} free before, at {each} bytes a token",
        )
    tokens_each = min(request.context_length, _AUTO_TOKENS_EACH)
    wanted = request.max_running_requests * tokens_each
    limit = int(request.free_after * _AUTO_SHARE) // each
    of = f"{request.max_running_requests} requests x {tokens_each} tokens at {each} bytes a token"
    if wanted < request.context_length:
        wanted = _round_up(request.context_length, request.page_size)
        of = f"one full context, {wanted} tokens at {each} bytes a token"
    return min(wanted, limit), f"{of}, at most 25 % of {_mib(request.free_after)} free"


def _too_small(request: KvRequest, room: int, explain: str) -> str:
    need = _round_up(request.context_length, request.page_size)
    size = _mib(need * request.kv_bytes_per_token)
    ways = []
    if room:
        # A pool that follows from free memory is never the same twice.
        ways.append(f"model.context_length: {room if request.max_total_tokens is not None else _with_margin(room, request.page_size)}")
    if need <= _affordable(request):
        ways.append(f"memory.max_total_tokens: {need} ({size})")
        if not room and request.max_total_tokens is None and (fraction := _fraction_for(request, need)) is not None:
            ways.append(f"memory.mem_fraction_static: {fraction:.2f}")
        if request.max_total_tokens is not None and not room:
            ways.append(f"memory.page_size: {_smaller_page(request.max_total_tokens)} with memory.clamp_context: true")
    elif not room and (most := _affordable(request)):
        ways.append(f"memory.max_total_tokens: {most} with model.context_length: {most}")
    if room:
        ways.append("memory.clamp_context: true")
    set_one = ", or ".join(ways) or f"a smaller model, or free {size}"
    return f"the KV pool holds {max(0, room)} tokens, one request of full context needs {need} ({explain}): set {set_one}"


def _too_large(request: KvRequest, room: int) -> str:
    most = _affordable(request)
    size = f"{_mib(room * request.kv_bytes_per_token)}, {_mib(max(0, request.free_after))} are free"
    if not most:
        return f"memory.max_total_tokens: {room} tokens of KV need {size}: take a smaller model, or free memory"
    context = f" with model.context_length: {most}" if most < request.context_length else ""
    return f"memory.max_total_tokens: {room} tokens of KV need {size}: set memory.max_total_tokens: {most}{context}"


def _affordable(request: KvRequest) -> int:
    """Tokens in whole pages that free memory holds, with a margin for what changes until the next start."""
    return _with_margin(max(0, request.free_after) // request.kv_bytes_per_token, request.page_size)


def _with_margin(tokens: int, page_size: int) -> int:
    return int(tokens * _MARGIN) // page_size * page_size or min(tokens, page_size) // page_size * page_size


def _fraction_for(request: KvRequest, tokens: int) -> float | None:
    """The mem_fraction_static that leaves `tokens`, rounded up; None where even 1 does not."""
    fraction = 1 - (request.free_after - tokens * request.kv_bytes_per_token / _MARGIN) / max(1, request.free_before)
    return math.ceil(fraction * 100) / 100 if fraction <= 0.99 else None


def _smaller_page(tokens: int) -> int:
    """The largest power of two of which `tokens` fill one."""
    return 1 << (max(1, tokens).bit_length() - 1)


def _round_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
