"""Finds and loads the native kernels, `libllmd_kernels.so`, and declares the C functions that all of them share.

`library()` is the loaded library, or None: then `why_absent()` says why, and the torch path serves. `LLMD_ISA` (scalar, avx2, avx512, amx) forces an
instruction set; one that the CPU lacks, or an unknown word, raises ConfigError: whoever sets it wants that one and no other.
ctypes lets go of the interpreter lock during each call. Imports neither numpy nor torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmd.errors import ConfigError

PATH = Path(__file__).with_name("libllmd_kernels.so")
#: As in src/abi.h: raised when a signature changes.
ABI_VERSION = 5
#: In the order of src/isa.h.
ISAS = ("scalar", "avx2", "avx512", "amx")

#: What a function returns, and what it takes. Pointers are void*: addresses as int, or None.
Signatures = Mapping[str, tuple[Any, Sequence[Any]]]

_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

SIGNATURES: Signatures = {
    "llmd_isa": (_int, []),
    "llmd_isa_best": (_int, []),
    "llmd_isa_set": (_int, [_int]),
    "llmd_pool_new": (_pointer, [_int, _pointer, _int, _int]),
    "llmd_pool_free": (None, [_pointer]),
    "llmd_pool_threads": (_int, [_pointer]),
    "llmd_packed_size": (_int64, [_int, _int, _int]),
    "llmd_pack": (_int, [_pointer, _int, _int, _int, _int, _int, _pointer, _int]),
    "llmd_unpack_rows": (_int, [_pointer, _int, _int, _int, _pointer, _int, _pointer, _int64]),
    "llmd_quant_rows_size": (_int64, [_int, _int, _int]),
    "llmd_rows_read": (_int, [_int, _int]),
    "llmd_quantize_rows": (_int, [_pointer, _pointer, _int64, _int, _int, _int, _pointer]),
    "llmd_linear": (_int, [_pointer, _pointer, _int, _int, _int, _pointer, _int64, _int, _pointer, _int64, _int]),
}


class LibraryMissing(Exception):
    """There is no library to use; the text says why, and what to do."""


def library() -> ctypes.CDLL | None:
    """The kernels, with `SIGNATURES` declared and the ISA chosen. Loaded once a process."""
    return _loaded()[0]


def why_absent() -> str | None:
    """Why `library()` is None; None if it is not."""
    return _loaded()[1]


def declare(signatures: Signatures) -> None:
    """Tells ctypes the signatures of more functions. Nothing happens without the library."""
    if (lib := library()) is not None:
        _declare(lib, signatures)


def isa_name(lib: ctypes.CDLL) -> str:
    """The instruction set in use."""
    return ISAS[lib.llmd_isa()]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        lib = load(PATH)
    except LibraryMissing as error:
        return None, str(error)
    choose_isa(lib, os.environ.get("LLMD_ISA"))
    return lib, None


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`. Raises LibraryMissing."""
    if not path.exists():
        raise LibraryMissing("the native kernels were not built (no C++ compiler at install time, or not x86-64); `python -m llmd.kernels.build` says more")
    try:
        lib = ctypes.CDLL(str(path))
        version = lib.llmd_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"the native kernels do not load: {error}") from None
    if version != ABI_VERSION:
        raise LibraryMissing(f"the native kernels are of another build (ABI {version}, not {ABI_VERSION}): run `python -m llmd.kernels.build`")
    try:
        _declare(lib, SIGNATURES)
    except AttributeError as error:
        raise LibraryMissing(f"the native kernels are of another build ({error}): run `python -m llmd.kernels.build`") from None
    return lib


def choose_isa(lib: ctypes.CDLL, wanted: str | None) -> None:
    """Makes `wanted` the ISA in use; None or "" keeps the best one."""
    if not wanted:
        return
    if wanted not in ISAS:
        raise ConfigError(f"LLMD_ISA={wanted}: not one of {', '.join(ISAS)}")
    if lib.llmd_isa_set(ISAS.index(wanted)):
        raise ConfigError(f"LLMD_ISA={wanted}: this CPU has no more than {ISAS[lib.llmd_isa_best()]}")


def _declare(lib: ctypes.CDLL, signatures: Signatures) -> None:
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
