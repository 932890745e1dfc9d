"""What the tests of the native kernels share: aligned memory, thread pools, and linears called through the C ABI."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from llmd.kernels.packing import FORMATS, rows_read
from llmd.kernels.shared_library import ISAS, library

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def lib() -> ctypes.CDLL:
    """The library; these tests are of it, so it is an error if there is none."""
    loaded = library()
    assert loaded is not None
    return loaded


def isas() -> list[str]:
    """What this CPU has."""
    loaded = library()
    return list(ISAS[: loaded.llmd_isa_best() + 1]) if loaded is not None else []


@contextmanager
def using(isa: str) -> Iterator[None]:
    before = lib().llmd_isa()
    assert lib().llmd_isa_set(ISAS.index(isa)) == 0
    try:
        yield
    finally:
        lib().llmd_isa_set(before)


@contextmanager
def pool(threads: int, spin: int = -1) -> Iterator[int]:
    handle = lib().llmd_pool_new(threads, None, 0, spin)
    assert handle
    try:
        yield handle
    finally:
        lib().llmd_pool_free(handle)


def aligned(size: int) -> Bytes:
    """Zeroed bytes that start at a multiple of 64."""
    memory = np.zeros(size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def packed(format: str, n: int, k: int, source: npt.NDArray[Any], kind: str) -> Bytes:
    memory = aligned(lib().llmd_packed_size(FORMATS[format], n, k))
    assert lib().llmd_pack(memory.ctypes.data, FORMATS[format], n, k, 0, n, source.ctypes.data, FORMATS[kind]) == 0
    memory.flags.writeable = False
    return memory


def unpacked(memory: Bytes, format: str, n: int, k: int, ids: list[int] | None = None) -> Floats:
    wanted = np.array(range(n) if ids is None else ids, dtype=np.int32)
    out = np.zeros((len(wanted), k), dtype=np.float32)
    assert lib().llmd_unpack_rows(memory.ctypes.data, FORMATS[format], n, k, wanted.ctypes.data, len(wanted), out.ctypes.data, k) == 0
    return out


def quantized_rows(x: Floats, handle: int, rows: int = 1) -> Bytes:
    m, k = x.shape
    memory = aligned(lib().llmd_quant_rows_size(m, k, rows))
    assert lib().llmd_quantize_rows(handle, x.ctypes.data, x.strides[0] // 4, m, k, rows, memory.ctypes.data) == 0
    return memory


def read_quantized(memory: Bytes, m: int, k: int) -> tuple[npt.NDArray[np.int8], Floats, Floats, npt.NDArray[np.int32]]:
    """q [m, groups, 32], d, ds and s [m, groups] out of a QuantRows (src/linear.h)."""
    blocks, groups = -(-m // 16), k // 32
    count = blocks * groups * 16

    def rows(array: npt.NDArray[Any], *tail: int) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.reshape(blocks, groups, 16, *tail).swapaxes(1, 2).reshape(blocks * 16, groups, *tail)[:m])

    numbers = memory[count * 32 :]
    d, ds, s = (numbers[i * count * 4 : (i + 1) * count * 4] for i in range(3))
    return rows(memory[: count * 32].view(np.int8), 32), rows(d.view(np.float32)), rows(ds.view(np.float32)), rows(s.view(np.int32))


def read_rounded(memory: Bytes, m: int, k: int, rows: int = 1) -> Floats:
    """The parts [rows, m, k] of activations out of a QuantRows of bf16."""
    blocks, groups = -(-m // 16), k // 32
    order = np.arange(k).reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1)  # the two in the middle of each four have changed places
    numbers = memory.view(np.uint16).reshape(blocks, groups, rows, 16, 32).transpose(2, 0, 3, 1, 4).reshape(rows, blocks * 16, k)[:, :m, order]
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def written_weights(w: Floats) -> Floats:
    """Dequantized weights as the matrix unit gets them: rounded to float16, then to bf16 (src/amx/weights.h)."""
    halves = (w * np.float32(16)).astype(np.float16).view(np.int16).astype(np.int32)
    bits = ((halves * 4096 + 0x4000) >> 15) & 0x8FFF | 0x3000
    return (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(4096)


def linear(weights: Bytes, format: str, n: int, x: Floats, handle: int, residual: Floats | None = None, *, spare: int = 3) -> Floats:
    """x W^T, or residual + x W^T. `spare`: more columns than outputs, in which nothing may be written."""
    m, k = x.shape
    y = aligned(m * (n + spare) * 4).view(np.float32).reshape(m, n + spare)
    y[:] = np.nan
    if residual is not None:
        y[:, :n] = residual
    kind = rows_read(format, k)
    rows = quantized_rows(x, handle, kind) if kind else x
    status = lib().llmd_linear(
        handle, weights.ctypes.data, FORMATS[format], n, k, rows.ctypes.data, x.strides[0] // 4, m, y.ctypes.data, n + spare, int(residual is not None)
    )
    assert status == 0
    assert np.isnan(y[:, n:]).all()
    return y[:, :n].copy()


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())
