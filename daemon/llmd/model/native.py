"""Whether the native kernels serve a model: the one place that decides between them and torch. Imports neither numpy nor torch."""

from __future__ import annotations

import os
from typing import Final

from llmd.config.server_args import ModelArgs
from llmd.kernels.shared_library import isa_name, library, why_absent

#: A value of LLMD_ISA that is no instruction set: the torch path serves, for comparison.
TORCH: Final = "torch"


def why_not() -> str | None:
    """Why torch has to serve on a CPU; None: the native kernels do. Raises ConfigError where LLMD_ISA asks for what this CPU lacks."""
    if os.environ.get("LLMD_ISA") == TORCH:
        return "LLMD_ISA=torch asks for torch"
    return why_absent() if library() is None else None


def needs_native(args: ModelArgs, reason: str) -> list[str]:
    """Faults of settings that only the native kernels have, which do not serve because of `reason`."""
    asked = []
    if args.quantization in ("int8", "int4"):
        asked.append(f"model.quantization: {args.quantization} needs the native CPU kernels ({reason}); set it to auto or none")
    if args.kv_cache_dtype == "int8":
        asked.append(f"model.kv_cache_dtype: int8 needs the native CPU kernels ({reason}); set it to auto, float32 or bfloat16")
    return asked


def kv_dtype(args: ModelArgs) -> str:
    """Type of the KV cache, `auto` resolved."""
    if args.kv_cache_dtype != "auto":
        return args.kv_cache_dtype
    return "float32" if args.dtype == "float32" else "bfloat16"


def kernels_name() -> str:
    """The instruction set that the native kernels use, e.g. `avx512`."""
    lib = library()
    assert lib is not None
    return isa_name(lib)
