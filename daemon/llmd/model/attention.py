"""Attention over paged KV. `AttentionBackend` is planned once a step and called once a layer; `TorchAttention` is the reference.

The reference is exact: what a token gets depends on its own request's tokens up to it, bit for bit, not on the batch, nor on how a
prompt was cut. Keys come in blocks of a fixed number of positions. Scores are one product a block; the maximum over all of them
is exact in any order; each block's weights and weighted values are summed by themselves, and the blocks are added in order.
What lies behind a token, padding included, has weight 0 and changes no sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from llmd.model.batch import ForwardBatch, Ints
from llmd.model.exact import RowPlan, row_plan
from llmd.model.kv_cache import KVCache
from llmd.store.model_config import ModelConfig

#: Positions of a block of keys.
BLOCK = 128
#: Queries of one request that are computed at once: their scores should stay in a cache.
QUERIES = 64
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
class _Tile:
    """Queries that are computed at once: `new` of each request of their group, over the group's first `blocks` blocks."""

    rows: torch.Tensor | slice
    """Rows of the step's tokens, requests * new of them."""
    positions: torch.Tensor
    """[requests, new]"""
    blocks: int
    clear: int
    """Leading blocks of which every query sees all, windows apart."""
    masks: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """window -> (first block masked, additive mask [blocks - first, 1, requests, 1, new, BLOCK])."""


@dataclass(slots=True)
class _Group:
    """Requests whose keys are gathered together, each padded to `blocks` blocks with its own first slot."""

    requests: int
    blocks: int
    index: torch.Tensor
    """[2 * blocks * kv_heads * requests * BLOCK]: where their K lie in the cache, then their V."""
    tiles: list[_Tile]


class TorchAttention:
    """The reference in torch operations."""

    def __init__(self, config: ModelConfig, cache: KVCache, device: torch.device) -> None:
        self._config = config
        self._cache = cache
        self._device = device
        self._queries = _query_plan(config, device)
        self._out_index = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Where each group's keys lie, and its tiles."""
        self._out_index = self._cache.index(torch.from_numpy(batch.out_cache_loc).to(self._device)).flatten()
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens
        self._groups = []
        for requests in _by_length(np.flatnonzero(batch.extend_lens == 1), batch.seq_lens):
            # All in one group and in order, as in a step that only decodes: nothing has to be moved.
            rows = slice(None) if len(requests) == len(batch.input_ids) else torch.from_numpy(starts[requests]).to(self._device)
            self._groups.append(self._group(batch, requests, [self._tile(rows, batch.seq_lens[requests, None] - 1)]))
        for request in np.flatnonzero(batch.extend_lens > 1):
            start, end = int(starts[request]), int(starts[request] + batch.extend_lens[request])
            tiles = []
            for first in range(start, end, self._queries.size):
                rows_ = slice(first, min(first + self._queries.size, end))
                tiles.append(self._tile(rows_, batch.positions[None, rows_]))
            self._groups.append(self._group(batch, np.array([request]), tiles))

    def forward(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        heads, dim = self._config.num_heads, self._config.head_dim
        self._cache.write(layer, self._out_index, qkv[:, heads:].transpose(0, 1))
        q = qkv[:, :heads].float() * dim**-0.5
        out = torch.empty((qkv.shape[0], heads * dim), dtype=qkv.dtype, device=qkv.device)
        for group in self._groups:
            kv = self._cache.gather(layer, group.index).view(2, group.blocks, -1, BLOCK, dim)
            for tile in group.tiles:
                out[tile.rows] = self._attend(tile, self._config.window(layer), q[tile.rows], kv[:, : tile.blocks]).to(out.dtype)
        return out

    def _attend(self, tile: _Tile, window: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [requests * new, heads, dim], kv [2, blocks, kv_heads * requests, BLOCK, dim] -> [requests * new, heads * dim]."""
        kv_heads, dim, blocks = self._config.num_kv_heads, self._config.head_dim, tile.blocks
        requests, new = tile.positions.shape
        # The query heads of one KV head become its query rows: K and V are read once and never repeated.
        q = q.view(requests, new, kv_heads, -1, dim).permute(2, 0, 3, 1, 4)
        if new < self._queries.least:
            q = F.pad(q, (0, 0, 0, self._queries.least - new))
        group = q.shape[2]
        q = q.reshape(1, kv_heads * requests, -1, dim).expand(blocks, -1, -1, -1)
        scores = torch.matmul(q, kv[0].transpose(-1, -2))  # [blocks, kv_heads * requests, group * new, BLOCK]
        first, mask = self._mask(tile, window)
        if first < blocks:
            scores.view(blocks, kv_heads, requests, group, -1, BLOCK)[first:, ..., :new, :].add_(mask)
        scores.sub_(scores.amax(-1).amax(0)[None, ..., None]).exp_()
        total = _in_order(scores.sum(-1))
        out = _in_order(torch.matmul(scores, kv[1])).div_(total[..., None])
        out = out.view(kv_heads, requests, group, -1, dim)[:, :, :, :new]
        return out.permute(1, 3, 0, 2, 4).reshape(requests * new, -1)

    def _mask(self, tile: _Tile, window: int) -> tuple[int, torch.Tensor]:
        """(first block to be masked, mask of the blocks from there)."""
        if window not in tile.masks:
            first = 0 if window else tile.clear
            keys = torch.arange(first * BLOCK, tile.blocks * BLOCK, device=self._device).view(-1, 1, 1, 1, 1, BLOCK)
            distance = tile.positions[None, None, :, None, :, None] - keys
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            tile.masks[window] = first, torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)
        return tile.masks[window]

    def _tile(self, rows: torch.Tensor | slice, positions: Ints) -> _Tile:
        return _Tile(rows, torch.from_numpy(positions).to(self._device), int(positions.max()) // BLOCK + 1, (int(positions.min()) + 1) // BLOCK)

    def _group(self, batch: ForwardBatch, requests: Ints, tiles: list[_Tile]) -> _Group:
        lengths = batch.seq_lens[requests]
        longest = int(lengths.max())
        blocks = -(-longest // BLOCK)
        slots = np.empty((len(requests), blocks * BLOCK), dtype=np.int64)
        table = batch.req_to_token[batch.req_pool_indices[requests], :longest]
        slots[:, :longest] = np.where(np.arange(longest) < lengths[:, None], table, table[:, :1])
        slots[:, longest:] = table[:, :1]
        index = self._cache.index(torch.from_numpy(slots).to(self._device)).view(2, -1, len(requests), blocks, BLOCK)
        return _Group(len(requests), blocks, index.permute(0, 3, 1, 2, 4).flatten(), tiles)


def _query_plan(config: ModelConfig, device: torch.device) -> RowPlan:
    """How many queries a tile takes: their products are of `group` times as many rows."""
    group = config.num_heads // config.num_kv_heads
    keys = torch.randn(3, BLOCK, config.head_dim, generator=torch.Generator().manual_seed(1)).to(device)

    def scores(rows: torch.Tensor) -> torch.Tensor:
        return torch.matmul(rows.expand(3, -1, -1), keys.transpose(-1, -2)).transpose(0, 1)

    def values(rows: torch.Tensor) -> torch.Tensor:
        return torch.matmul(rows.expand(3, -1, -1), keys).transpose(0, 1)

    plans = (row_plan(scores, config.head_dim, keys, group * QUERIES), row_plan(values, BLOCK, keys, group * QUERIES))
    least = max(-(-plan.least // group) for plan in plans)
    return RowPlan(least, min(QUERIES, *(max(least, plan.size // group) for plan in plans)))


def _in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, one after the other: zeros at the end change nothing. The first block is changed."""
    total = blocks[0]
    for block in blocks[1:]:
        total.add_(block)
    return total


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
