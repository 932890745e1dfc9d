"""Records the Llama family's forward pass: llmd.model.llama in the operations of `Program`. The two are compared in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmd.kernels.packing import rows_read
from llmd.kernels.program import Floats, Program
from llmd.store.model_config import ModelConfig


class Packed(Protocol):
    """A packed matrix [n, k]."""

    @property
    def data(self) -> npt.NDArray[np.uint8]: ...
    @property
    def format(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...


def record_llama(program: Program, config: ModelConfig, matrices: Mapping[str, Packed], vectors: Mapping[str, Floats]) -> None:
    """Record all layers, pooling, head and sampling. Names are those of llmd.store.native_plan: `embed`, `lm_head`, `final_norm`, `LAYER.qkv`, ..."""
    model = _Llama(program, config, matrices, vectors)
    x = program.embed(model.matrix("embed"), program.buffer(config.hidden_size))
    for layer in range(config.num_layers):
        model.layer(layer, x)
    model.tail(x)


class _Llama:
    def __init__(self, program: Program, config: ModelConfig, matrices: Mapping[str, Packed], vectors: Mapping[str, Floats]) -> None:
        self._p, self._config, self._matrices, self._vectors = program, config, matrices, vectors
        self._handles: dict[int, int] = {}
        self._shared: dict[tuple[str, int], int] = {}

    def layer(self, index: int, x: int) -> None:
        """One decoder layer; x is changed."""
        p, config, at = self._p, self._config, f"{index}."
        h = p.rms_norm(x, self._vectors[at + "attn_norm"], config.rms_eps, self.input("h", at + "qkv"))
        qkv = self.linear(h, at + "qkv", self.buffer("qkv", self._matrices[at + "qkv"].n))
        if config.qk_norm:
            p.head_norm(self._vectors[at + "q_norm"], self._vectors[at + "k_norm"], config.rms_eps, qkv)
        p.rope_store(index, qkv)
        attended = p.attention(qkv, index, self.buffer("attended", config.q_size), window=config.window(index))
        if self.rows_read(at + "o"):
            attended = p.quantize(attended, self.input("attended", at + "o"))
        self.linear(attended, at + "o", x, add=True)
        h = p.rms_norm(x, self._vectors[at + "mlp_norm"], config.rms_eps, self.input("h", at + "gate_up"))
        inner = self.gated(h, at + "gate_up", self.input("inner", at + "down"))
        self.linear(inner, at + "down", x, add=True)

    def tail(self, x: int) -> None:
        """Embeddings; logits of the wanted rows, and what is chosen from them."""
        p, config = self._p, self._config
        p.pool_embeddings(x, self._vectors["final_norm"], config.rms_eps)
        head = self.matrix("lm_head")
        last = p.select(x)
        h = p.rms_norm(last, self._vectors["final_norm"], config.rms_eps, p.input_of(head, config.hidden_size))
        p.sample(p.linear(h, head, p.buffer(config.vocab_size)))

    def linear(self, x: int, name: str, out: int, *, add: bool = False) -> int:
        """out (+)= x W^T + b"""
        self._p.linear(x, self.matrix(name), out, add=add)
        bias = self._vectors.get(f"{name}_bias")
        return out if bias is None else self._p.add_bias(bias, out)

    def gated(self, x: int, name: str, out: int) -> int:
        """out = silu(gate) * up, where gate and up are x W^T + b"""
        middle = self.buffer("gate_up", self._matrices[name].n)
        if f"{name}_bias" in self._vectors:
            return self._p.swiglu(self.linear(x, name, middle), out)
        return self._p.gated(x, self.matrix(name), middle, out)

    def matrix(self, name: str) -> int:
        packed = self._matrices[name]
        key = packed.data.ctypes.data
        if key not in self._handles:
            self._handles[key] = self._p.matrix(packed.data, packed.format, packed.n, packed.k)
        return self._handles[key]

    def buffer(self, name: str, width: int, *, kind: int = 0) -> int:
        """The buffer of that name, shared by all layers."""
        key = (name, kind)
        if key not in self._shared:
            self._shared[key] = self._p.buffer(width, kind=kind)
        return self._shared[key]

    def input(self, name: str, matrix: str) -> int:
        """The buffer of that name, of the kind that linear `matrix` reads."""
        return self.buffer(name, self._matrices[matrix].k, kind=self.rows_read(matrix))

    def rows_read(self, matrix: str) -> int:
        return rows_read(self._matrices[matrix].format, self._matrices[matrix].k)
