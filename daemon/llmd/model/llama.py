"""The Llama family's forward pass: thin modules of our own on plain tensors. Weights come from `llmd.model.loader`, attention from a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from llmd.model.attention import AttentionBackend
from llmd.model.exact import ANY_ROWS, RowPlan, rowwise
from llmd.model.rope import Rope, rotate
from llmd.store.model_config import ModelConfig


@dataclass(slots=True)
class Linear:
    """y = x W + b; `weight` [in, out]."""

    weight: Tensor
    bias: Tensor | None = None
    rows: RowPlan = ANY_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        y = rowwise(x, self.weight, self.rows)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(slots=True)
class Layer:
    """One decoder layer. `qkv` is q, k and v in one linear, `gate_up` gate and up."""

    index: int
    attn_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear

    def forward(self, x: Tensor, rotations: Tensor, attention: AttentionBackend, config: ModelConfig) -> Tensor:
        """[T, hidden] -> [T, hidden]; `x` is changed."""
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.qkv(self.attn_norm(x)).view(-1, heads + 2 * kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
            qkv[:, heads : heads + kv_heads] = self.k_norm(qkv[:, heads : heads + kv_heads])
        rotate(qkv[:, : heads + kv_heads], rotations)
        x += self.o(attention.forward(self.index, qkv))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        x += self.down(F.silu(gate).mul_(up))
        return x


class LlamaModel:
    """Embedding, layers, final norm and head."""

    def __init__(self, config: ModelConfig, embedding: Tensor, layers: list[Layer], final_norm: RMSNorm, head: Linear, rope: Rope) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rope = rope

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[T, hidden] after the last layer, before the final norm. `attention` has been planned for this step."""
        x = F.embedding(input_ids, self.embedding)
        rotations = self.rope.rotations(positions)
        for layer in self.layers:
            x = layer.forward(x, rotations, attention, self.config)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocabulary] of some rows of `hidden`."""
        return self.head(self.final_norm(hidden)).float()
