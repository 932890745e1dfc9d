"""`KVCache`: the K and V of every token slot, one tensor a layer. Which slot is whose is the scheduler's business."""

from __future__ import annotations

import torch

from llmd.store.model_config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's K and V take in all layers."""
    return int(config.num_layers * 2 * config.kv_size * dtype.itemsize)


class KVCache:
    """Per layer [2 * kv_heads * slots, head_dim]: all slots of one head lie together, K's heads before V's.

    A gather in that order is what batched products take as it is.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device, *, preallocate: bool = False) -> None:
        """Unless `preallocate`, nothing is written: on a CPU, pages that no token has touched take no memory."""
        self.num_slots = num_slots
        self.dtype = dtype
        planes = 2 * config.num_kv_heads
        self.layers = [torch.empty((planes * num_slots, config.head_dim), dtype=dtype, device=device) for _ in range(config.num_layers)]
        if preallocate:
            for layer in self.layers:
                layer.zero_()
        self._planes = torch.arange(planes, device=device) * num_slots

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """[2 * kv_heads, *slots.shape]: where the K and V of `slots` lie."""
        return self._planes.view(-1, *(1,) * slots.dim()) + slots

    def write(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """Put `kv` [2 * kv_heads, T, head_dim] at `index` [2 * kv_heads * T]."""
        self.layers[layer].index_copy_(0, index, kv.to(self.dtype).flatten(0, 1))

    def gather(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """float32 [N, head_dim] of `index` [N]."""
        return self.layers[layer].index_select(0, index).float()
