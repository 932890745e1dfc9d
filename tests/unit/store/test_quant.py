"""Dequantizing gives the values of the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llmd.errors import ConfigError
from llmd.store.quant import CHUNK, dequantize


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_are_those_of_the_reference(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    values = (np.random.default_rng(1).standard_normal((37, 256)) * 3).astype(np.float32)
    raw = gguf.quants.quantize(values, number).view(np.uint8).reshape(37, -1)
    assert np.array_equal(dequantize(raw, kind), gguf.quants.dequantize(raw, number).reshape(37, 256))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_any_bytes_can_be_dequantized(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(2).integers(0, 256, (5, size * 3), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = dequantize(raw, kind)
        assert ours.shape == (5, block * 3)
        assert np.array_equal(ours, gguf.quants.dequantize(raw, number), equal_nan=True)


def test_large_tensors_are_done_in_parts() -> None:
    rows = CHUNK // 64 + 5
    values = np.random.default_rng(3).standard_normal((rows, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert raw.nbytes > CHUNK
    assert np.array_equal(dequantize(raw, "Q8_0"), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))


def test_a_type_nobody_can_read_is_named() -> None:
    with pytest.raises(ConfigError, match="Q8_K"):
        dequantize(np.zeros((1, 292), dtype=np.uint8), "Q8_K")
