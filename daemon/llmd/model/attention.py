"""Attention over paged KV. `AttentionBackend` is planned once a step and called once a layer; `TorchAttention` is the reference.

Requests with one new token (decode) are computed together, padded to the longest of their group; each longer one (prefill, with or
without a cached prefix) alone. What is padded is masked and comes from the request's own first slot, so no request sees another's values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from llmd.model.batch import ForwardBatch, Ints
from llmd.model.kv_cache import KVCache
from llmd.store.model_config import ModelConfig

#: Padded tokens that a decode group may carry before a second group is worth its calls.
MAX_PADDING = 1024


class AttentionBackend(Protocol):
    """Writes a layer's new K and V, and attends over the cache."""

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """`qkv` [T, heads + 2 * kv_heads, head_dim], rotated: q, k, v. Returns [T, heads * head_dim]."""
        ...


@dataclass(slots=True)
class _Group:
    """Requests that are computed in one call: n requests with `new` new tokens each, `length` tokens (padded) each."""

    rows: torch.Tensor | slice
    """Rows of the step's tokens, n * new of them."""
    slots: torch.Tensor
    """[n * length]"""
    n: int
    new: int
    length: int
    valid: npt.NDArray[np.bool_]
    """[n, new, length]: what each new token may see, windows apart."""
    distance: npt.NDArray[np.int64]
    """[n, new, length]: how far back each token is."""
    causal: bool = False
    """Whole prompt without prefix: torch's own causal mask serves."""
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """window -> additive mask [n, 1, new, length], or None where nothing is masked."""


class TorchAttention:
    """The reference on torch's scaled_dot_product_attention."""

    def __init__(self, config: ModelConfig, cache: KVCache, req_to_token: npt.NDArray[np.int32], dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._cache = cache
        self._req_to_token = req_to_token
        self._dtype = dtype
        self._device = device
        self._out_slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Slots and masks of each group."""
        self._out_slots = torch.from_numpy(batch.out_cache_loc).to(self._device)
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens
        self._groups = []
        decode = np.flatnonzero(batch.extend_lens == 1)
        for requests in _by_length(decode, batch.seq_lens):
            self._groups.append(self._decode_group(batch, requests, starts))
        for request in np.flatnonzero(batch.extend_lens > 1):
            self._groups.append(self._prefill_group(batch, int(request), int(starts[request])))

    def forward(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        self._cache.write(layer, self._out_slots, qkv[:, heads:].unflatten(1, (2, kv_heads)))
        q = qkv[:, :heads]
        if len(self._groups) == 1:
            return self._attend(layer, self._groups[0], q).reshape(-1, heads * dim)
        out = torch.empty((qkv.shape[0], heads * dim), dtype=qkv.dtype, device=qkv.device)
        for group in self._groups:
            out[group.rows] = self._attend(layer, group, q[group.rows]).reshape(-1, heads * dim)
        return out

    def _attend(self, layer: int, group: _Group, q: torch.Tensor) -> torch.Tensor:
        """q [n * new, heads, dim] -> the same shape."""
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        kv = self._cache.gather(layer, group.slots, q.dtype).view(group.n, group.length, 2, kv_heads, dim)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        window = config.window(layer)
        mask = self._mask(group, window)
        if group.new == 1:
            # The query heads of one KV head become its query rows: K and V are read once and never repeated.
            out = F.scaled_dot_product_attention(q.view(group.n, kv_heads, heads // kv_heads, dim), k, v, attn_mask=mask)
            return out.reshape(group.n, heads, dim)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        q = q.view(group.n, group.new, heads, dim).transpose(1, 2)
        causal = group.causal and not window
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if causal else mask, is_causal=causal)
        return out.transpose(1, 2).reshape(-1, heads, dim)

    def _mask(self, group: _Group, window: int) -> torch.Tensor | None:
        if group.causal and not window:
            return None
        if window not in group.masks:
            seen = group.valid if not window else group.valid & (group.distance < window)
            mask = None
            if not seen.all():
                additive = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
                mask = torch.from_numpy(additive).to(self._device, self._dtype)
                if group.new == 1:
                    mask = mask.expand(-1, -1, self._config.num_heads // self._config.num_kv_heads, -1)
            group.masks[window] = mask
        return group.masks[window]

    def _decode_group(self, batch: ForwardBatch, requests: Ints, starts: Ints) -> _Group:
        lengths = batch.seq_lens[requests]
        longest = int(lengths.max())
        columns = np.arange(longest)
        valid = columns[None] < lengths[:, None]
        table = self._req_to_token[batch.req_pool_indices[requests], :longest].astype(np.int64)
        slots = np.where(valid, table, table[:, :1])
        return _Group(
            rows=torch.from_numpy(starts[requests]).to(self._device),
            slots=torch.from_numpy(slots.reshape(-1)).to(self._device),
            n=len(requests),
            new=1,
            length=longest,
            valid=valid[:, None],
            distance=(lengths[:, None] - 1 - columns[None])[:, None],
        )

    def _prefill_group(self, batch: ForwardBatch, request: int, start: int) -> _Group:
        new, length = int(batch.extend_lens[request]), int(batch.seq_lens[request])
        slots = self._req_to_token[batch.req_pool_indices[request], :length].astype(np.int64)
        distance = np.arange(length - new, length)[:, None] - np.arange(length)[None]
        return _Group(
            rows=slice(start, start + new),
            slots=torch.from_numpy(slots).to(self._device),
            n=1,
            new=new,
            length=length,
            valid=(distance >= 0)[None],
            distance=distance[None],
            causal=new == length,
        )


def _by_length(requests: Ints, lengths: Ints) -> list[Ints]:
    """Split decode requests into groups of like length. One group keeps the batch's order, so that nothing has to be moved."""
    if not len(requests):
        return []
    ordered = requests[np.argsort(-lengths[requests], kind="stable")]
    groups, first = [], 0
    for index in range(1, len(ordered)):
        padding = int(lengths[ordered[first]] * (len(ordered) - index) - lengths[ordered[index:]].sum())
        if padding > MAX_PADDING and lengths[ordered[index]] * 4 < lengths[ordered[first]] * 3:
            groups.append(ordered[first:index])
            first = index
    groups.append(ordered[first:])
    return [requests] if len(groups) == 1 else groups
