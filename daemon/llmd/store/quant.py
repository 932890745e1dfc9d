"""GGUF block types -> float32, in numpy. Formulas: ggml-quants.c (`dequantize_row_*`); a scale is a float16 before its block's values.

The common types are here; the rarer ones go through the `gguf` package, imported only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmd.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: Bytes dequantized at once, so that temporary arrays stay in the cache.
CHUNK: Final = 2**20


def dequantize(raw: Bytes, kind: str) -> Floats:
    """`raw` [rows, bytes of a row] of type `kind` -> float32 [rows, columns]. F32 comes back as a view, not a copy."""
    if kind == "F32":
        return raw.view("<f4")
    convert = _BLOCKS.get(kind) or _from_package(kind)
    step = max(1, CHUNK // max(1, raw.shape[1]))
    first = convert(np.ascontiguousarray(raw[:step]))
    if step >= raw.shape[0]:
        return first
    out = np.empty((raw.shape[0], first.shape[1]), dtype=np.float32)
    out[:step] = first
    for start in range(step, raw.shape[0], step):
        out[start : start + step] = convert(np.ascontiguousarray(raw[start : start + step]))
    return out


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def bf16_to_f32(raw: Bytes) -> Floats:
    """bfloat16 is the upper half of a float32."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _blocks(raw: Bytes, size: int) -> Bytes:
    return raw.reshape(raw.shape[0], -1, size)


def _scale(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """16 bytes -> 32 values: first the low halves, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)


def _q8_0(raw: Bytes) -> Floats:
    blocks = _blocks(raw, 34)
    return (_scale(blocks, 0) * blocks[..., 2:].view(np.int8).astype(np.float32)).reshape(raw.shape[0], -1)


def _q4_0(raw: Bytes) -> Floats:
    blocks = _blocks(raw, 18)
    return (_scale(blocks, 0) * (_nibbles(blocks[..., 2:]) - np.float32(8))).reshape(raw.shape[0], -1)


def _q4_1(raw: Bytes) -> Floats:
    blocks = _blocks(raw, 20)
    return (_scale(blocks, 0) * _nibbles(blocks[..., 4:]) + _scale(blocks, 2)).reshape(raw.shape[0], -1)


_BLOCKS: Final[dict[str, Callable[[Bytes], Floats]]] = {"F16": _f16, "BF16": bf16_to_f32, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def _from_package(kind: str) -> Callable[[Bytes], Floats]:
    import gguf

    number: Any = gguf.GGMLQuantizationType[kind]

    def convert(raw: Bytes) -> Floats:
        try:
            return np.asarray(gguf.quants.dequantize(raw, number), dtype=np.float32)
        except NotImplementedError:
            raise ConfigError(f"tensors of GGUF type {kind} cannot be read") from None

    return convert
