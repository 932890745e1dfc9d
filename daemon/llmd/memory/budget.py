"""How many KV pages there will be: a pure function of settings and measured numbers, the same in `llmd check` and at load.

On a CPU: KV for `max_running_requests` times min(context, 2,048) tokens, at least one full context, at most a quarter of the free memory. Where
`mem_fraction_static` is a number, and on a GPU: free after weights minus (1 - fraction) times free before. `max_total_tokens`
overrides both. A pool that cannot hold one request of full context is refused, or the context clamped where that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmd.errors import ConfigError

AUTO_RUNNING_REQUESTS = 64
_AUTO_TOKENS_EACH = 2048
_AUTO_SHARE = 0.25
_GPU_FRACTION = 0.88


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
    fits = need * request.kv_bytes_per_token <= request.free_after
    shorter = f"model.context_length: {room}" if room else "a smaller model or one with a smaller kv_cache_dtype"
    larger = f"memory.max_total_tokens: {need}" if fits else f"{_mib(need * request.kv_bytes_per_token)} of free memory for memory.max_total_tokens: {need}"
    return (
        f"the KV pool holds {max(0, room)} tokens, one request of full context needs {need} ({explain}): set {shorter}, or {larger}"
        f"{', or memory.clamp_context: true' if room else ''}"
    )


def _too_large(request: KvRequest, room: int) -> str:
    each = request.kv_bytes_per_token
    most = request.free_after // each // request.page_size * request.page_size
    return (
        f"memory.max_total_tokens: {room} tokens of KV need {_mib(room * each)}, {_mib(request.free_after)} are free: "
        f"set memory.max_total_tokens: {most} or less, and model.context_length no larger than that"
    )


def _round_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
