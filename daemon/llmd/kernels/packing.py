"""Packing weights for the kernels: the formats of src/linear.h by GGUF's names, numpy arrays in and out. Needs the library but for the names."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from llmd.kernels.shared_library import library, why_absent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

#: Raised when src/pack.cpp comes to lay the same weights out otherwise: packs in the cache are then made again.
LAYOUT_VERSION: Final = 1
#: Numbers of src/linear.h's Format and Source.
FORMATS: Final = {"F32": 0, "F16": 1, "BF16": 2, "Q4_0": 3, "Q4_1": 4, "Q8_0": 5}
QUANTIZED: Final = ("Q4_0", "Q4_1", "Q8_0")


def packed_size(format: str, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]."""
    size = int(_library().llmd_packed_size(FORMATS[format], n, k))
    if size < 0:
        raise ValueError(f"no matrix of {n} x {k} in {format}")
    return size


def pack(out: Bytes, format: str, n: int, k: int, first: int, rows: int, source: npt.NDArray[Any], kind: str) -> None:
    """Pack `rows` rows of `source`, contiguous and of GGUF type `kind`, as rows `first`... of the matrix in `out` (aligned to 64 bytes, zeroed)."""
    assert source.flags.c_contiguous
    assert source.nbytes == rows * source_bytes(kind, k)
    if _library().llmd_pack(out.ctypes.data, FORMATS[format], n, k, first, rows, source.ctypes.data, FORMATS[kind]):
        raise ValueError(f"cannot pack rows {first} to {first + rows} of {n} x {k} from {kind} to {format}")


def unpack_rows(packed: Bytes, format: str, n: int, k: int, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """float32 [len(ids), k]: rows of a packed matrix, as GGUF dequantizes them."""
    import numpy as np

    out = np.empty((len(ids), k), dtype=np.float32)
    ids = np.ascontiguousarray(ids, dtype=np.int32)
    if _library().llmd_unpack_rows(packed.ctypes.data, FORMATS[format], n, k, ids.ctypes.data, len(ids), out.ctypes.data, k):
        raise ValueError(f"cannot unpack rows of {n} x {k} in {format}")
    return out


def rows_read(format: str, k: int) -> int:
    """What a linear with such a matrix reads its activations as: 0 float32, else a kind of src/linear.h's Rows that is made for it."""
    return int(_library().llmd_rows_read(FORMATS[format], k))


def source_bytes(kind: str, k: int) -> int:
    """Bytes of a row of `k` elements as GGUF stores `kind`."""
    block, size = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}[kind]
    return k // block * size


def _library() -> ctypes.CDLL:
    lib = library()
    if lib is None:
        raise RuntimeError(why_absent() or "the native kernels are absent")
    return lib
