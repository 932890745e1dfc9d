"""`KVCache`: the K and V of every token slot, one tensor a layer. Which slot is whose is the scheduler's business."""

from __future__ import annotations

import torch

from llmd.store.model_config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's K and V take in all layers."""
    return int(config.num_layers * 2 * config.kv_size * dtype.itemsize)


class KVCache:
    """Per layer [slots, 2, kv_heads, head_dim]: K and V side by side, so that one copy writes and one gather reads both."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is written: on a CPU, pages that no token has touched take no memory."""
        shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
        self.num_slots = num_slots
        self.dtype = dtype
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Put `kv` [T, 2, kv_heads, head_dim] into `slots` [T]."""
        self.layers[layer].index_copy_(0, slots, kv.to(self.dtype))

    def gather(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, 2, kv_heads, head_dim] of `slots` [N], in `dtype`."""
        return self.layers[layer].index_select(0, slots).to(dtype)
