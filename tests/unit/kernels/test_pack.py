"""Packing: nothing is lost of what GGUF holds, plain numbers are rounded well, and matrices may be packed side by side."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llmd.kernels.packing import FORMATS, QUANTIZED
from llmd.kernels.shared_library import library
from tests.unit.kernels import native

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


def floats(n: int, k: int) -> native.Floats:
    return np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_unpacked_rows_are_what_gguf_dequantizes(format: str) -> None:
    n, k = 45, 96
    kind = gguf.GGMLQuantizationType[format]
    source = np.ascontiguousarray(gguf.quants.quantize(floats(n, k), kind))
    memory = native.packed(format, n, k, source, format)
    wanted = gguf.quants.dequantize(source, kind).reshape(n, k).astype(np.float32)
    assert native.same_bits(native.unpacked(memory, format, n, k), wanted)
    assert native.same_bits(native.unpacked(memory, format, n, k, [44, 0, 44]), wanted[[44, 0, 44]])


def test_every_half_precision_number_survives() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    memory = native.packed("F16", 64, 1024, halves, "F16")
    out = native.unpacked(memory, "F16", 64, 1024)
    assert np.array_equal(out, halves.astype(np.float32), equal_nan=True)
    again = native.packed("F16", 64, 1024, out, "F32")  # and is rounded to itself
    assert np.array_equal(native.unpacked(again, "F16", 64, 1024), out, equal_nan=True)


@pytest.mark.parametrize("format", ["F16", "BF16"])
def test_numbers_are_rounded_to_nearest_even(format: str) -> None:
    n, k = 32, 200
    source = floats(n, k) * np.logspace(-9, 6, k, dtype=np.float32)
    kind = gguf.GGMLQuantizationType[format]
    with np.errstate(over="ignore"):
        wanted = source.astype(np.float16).astype(np.float32) if format == "F16" else gguf.quants.dequantize(gguf.quants.quantize(source, kind), kind)
    assert native.same_bits(native.unpacked(native.packed(format, n, k, source, "F32"), format, n, k), wanted.reshape(n, k))


@pytest.mark.parametrize(("format", "bound"), [("Q8_0", 0.0062), ("Q4_1", 0.075)])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_groups_made_from_numbers_are_near_them(format: str, bound: float, kind: str) -> None:
    n, k = 32, 256
    values = floats(n, k)
    source = values if kind == "F32" else np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16))
    out = native.unpacked(native.packed(format, n, k, source, kind), format, n, k)
    assert np.sqrt(np.mean((out - values) ** 2)) < bound * values.std()


def test_four_bits_are_no_worse_than_gguf_makes_them() -> None:
    n, k = 64, 256
    values = floats(n, k) ** 3
    kind = gguf.GGMLQuantizationType.Q4_1
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = native.unpacked(native.packed("Q4_1", n, k, values, "F32"), "Q4_1", n, k)
    assert np.mean((ours - values) ** 2) < 0.9 * np.mean((theirs - values) ** 2)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_groups_of_one_value_are_exact(format: str, value: float) -> None:
    values = np.full((16, 64), value, dtype=np.float32)
    assert np.allclose(native.unpacked(native.packed(format, 16, 64, values, "F32"), format, 16, 64), values, rtol=5e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_matrices_packed_side_by_side_are_one(format: str) -> None:
    k, parts = 64, [64, 32, 40]
    lib, n = native.lib(), sum(parts)
    values = floats(n, k)
    kind = "Q4_0" if format == "Q4_0" else "F32"
    source = np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))
    whole = native.packed(format, n, k, source, kind)
    memory = native.aligned(len(whole))
    row = 0
    for rows in parts:
        part = np.ascontiguousarray(source[row : row + rows])
        assert lib.llmd_pack(memory.ctypes.data, FORMATS[format], n, k, row, rows, part.ctypes.data, FORMATS[kind]) == 0
        row += rows
    assert (memory == whole).all()
    assert len(whole) % 64 == 0


@pytest.mark.parametrize("format", QUANTIZED)
def test_shapes_that_cannot_be_packed_are_refused(format: str) -> None:
    lib, number = native.lib(), FORMATS[format]
    assert lib.llmd_packed_size(number, 16, 33) == -1
    assert lib.llmd_packed_size(number, 0, 32) == -1
    assert lib.llmd_packed_size(99, 16, 32) == -1
    data = native.aligned(65536).ctypes.data
    for n, k, row0, rows in [(16, 33, 0, 16), (32, 32, 8, 16), (32, 32, 0, 8), (32, 32, 16, 32), (32, 32, -16, 16)]:
        assert lib.llmd_pack(data, number, n, k, row0, rows, data, number) == -1
    assert lib.llmd_unpack_rows(data, number, 16, 32, np.array([16], np.int32).ctypes.data, 1, data, 32) == -1
    assert lib.llmd_unpack_rows(data, number, 16, 32, np.array([-1], np.int32).ctypes.data, 1, data, 32) == -1
