"""`load_native`: from checked files to the packed weights that the native forward pass works on. numpy and the kernel library, no torch.

The packed weights come from the cache where they can, and then the files of weights are not read at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct

from llmd.errors import ConfigError
from llmd.kernels import packing
from llmd.model.frequencies import Floats, inverse_frequencies
from llmd.model.pack_cache import Progress, load_packed
from llmd.model.pack_file import Bytes, Item, PackKey, source_facts
from llmd.model.source import GgufSource, Source, floats, open_source, rope_factors
from llmd.plan.spec import Boot
from llmd.store.model_config import ModelConfig
from llmd.store.native_plan import MatrixPlan, NativePlan, Part, VectorPlan, make_plan
from llmd.store.parameters import all_parameters
from llmd.store.quant import dequantize

log = logging.getLogger(__name__)

#: Raise it when the same files and settings come to be packed otherwise: pairs, fusing, choice of formats.
PLAN_VERSION: Final = 2
STAGE: Final = "weights"
#: Rows converted at once, so that a large table's float32 copy never exists whole. A multiple of every panel.
_ROWS: Final = 4096


class Matrix(Struct, frozen=True):
    """One packed matrix [n, k]. Its bytes may be shared."""

    data: Bytes
    format: str
    n: int
    k: int


class NativeModel(Struct, frozen=True):
    """Weights and constants of one model; replaced as a whole when weights are reloaded."""

    config: ModelConfig
    matrices: dict[str, Matrix]
    """`NativePlan`'s names; `lm_head` is always there, and is `embed`'s own when tied."""
    vectors: dict[str, Floats]
    frequencies: Floats
    """[head_dim / 2]"""
    rope_scale: float
    quantization: str
    """What status shows: the formats of most bytes, or `none`."""
    dtype: str
    """Of what is not quantized."""
    weights_bytes: int
    cached: Path | None
    """The pack in the cache that they came from."""


def load_native(boot: Boot, progress: Progress) -> NativeModel:
    """Load the model of `boot`. Raises ConfigError."""
    args = boot.args.model
    source = open_source(boot.files)
    if args.verify_weights:
        _verify(source, progress)
    plan = make_plan(source.config, source.tensors(), args, gguf=isinstance(source, GgufSource))
    key = PackKey(
        weights_version=boot.files.weights_version,
        quantization=plan.quantization,
        layout=f"any-{packing.LAYOUT_VERSION}.{PLAN_VERSION}",
        sources=source_facts(source.files),
    )
    packed = load_packed(Path(boot.cache_dir), key, [*_items(source, plan)], progress)
    progress(STAGE, packed.nbytes, packed.nbytes)
    log.info("%.0f MiB of packed weights %s", packed.nbytes / 2**20, f"from {packed.path}" if packed.path else "in memory of their own")
    matrices = {m.name: Matrix(packed.tensors[m.name], m.format, m.n, m.k) for m in plan.matrices}
    if source.config.tie_embeddings:
        matrices["lm_head"] = matrices["embed"]
    frequencies, scale = inverse_frequencies(source.config, rope_factors(source))
    return NativeModel(
        config=source.config,
        matrices=matrices,
        vectors={v.name: packed.tensors[v.name].view(np.float32) for v in plan.vectors},
        frequencies=np.ascontiguousarray(frequencies, dtype=np.float32),
        rope_scale=scale,
        quantization=shown_quantization(plan),
        dtype=shown_dtype(plan),
        weights_bytes=packed.nbytes,
        cached=packed.path,
    )


def shown_quantization(plan: NativePlan) -> str:
    """The format of most quantized elements, in small letters as `q4_1`; `none` where nothing is quantized."""
    sizes: dict[str, int] = {}
    for matrix in plan.matrices:
        if matrix.format in packing.QUANTIZED:
            sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.n * matrix.k
    return max(sizes, key=lambda format: sizes[format]).lower() if sizes else "none"


def shown_dtype(plan: NativePlan) -> str:
    """The type of most elements that are not quantized; float32 where that is only norms."""
    sizes: dict[str, int] = {}
    for matrix in plan.matrices:
        if matrix.format not in packing.QUANTIZED:
            sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.n * matrix.k
    kind = max(sizes, key=lambda format: sizes[format]) if sizes else "F32"
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind]


def _items(source: Source, plan: NativePlan) -> Iterator[Item]:
    for matrix in plan.matrices:
        yield Item(matrix.name, packing.packed_size(matrix.format, matrix.n, matrix.k), lambda out, matrix=matrix: _pack(out, source, matrix))  # type: ignore[misc]
    for vector in plan.vectors:
        yield Item(vector.name, 4 * vector.n, lambda out, vector=vector: _fill(out, source, vector))  # type: ignore[misc]


def _pack(out: Bytes, source: Source, matrix: MatrixPlan) -> None:
    """Pack a matrix from blocks of rows; a block may come from several tensors."""
    types = {source.tensors()[part.tensor].type for part in matrix.parts}
    kind = next(iter(types)) if len(types) == 1 else ""
    as_stored = kind in packing.FORMATS and (kind == matrix.format or kind not in packing.QUANTIZED)
    for first in range(0, matrix.n, _ROWS):
        rows = min(_ROWS, matrix.n - first)
        pieces = [*_pieces(source, matrix.parts, first, rows, as_stored)]
        block = np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        packing.pack(out, matrix.format, matrix.n, matrix.k, first, rows, block, kind if as_stored else "F32")


def _pieces(source: Source, parts: tuple[Part, ...], first: int, rows: int, as_stored: bool) -> Iterator[Bytes]:
    """Rows [first, first + rows) of `parts` one below the other, as raw bytes [_, bytes of a row]: stored ones, or float32."""
    start = 0
    for part in parts:
        low, high = max(first - start, 0), min(first + rows - start, part.rows)
        start += part.rows
        if low >= high:
            continue
        raw = source.raw(part.tensor)
        chosen = raw[paired(part)[low:high]] if part.heads else raw[low:high]
        yield chosen if as_stored else dequantize(chosen, source.tensors()[part.tensor].type).view(np.uint8)


def _fill(out: Bytes, source: Source, vector: VectorPlan) -> None:
    parts = [floats(source, part.tensor)[paired(part)] if part.heads else floats(source, part.tensor) for part in vector.parts]
    out.view(np.float32)[:] = np.concatenate(parts)


def paired(part: Part) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Order of a part's rows that puts the halves (i, i + dim / 2) of each head side by side (2i, 2i + 1)."""
    return np.arange(part.rows).reshape(part.heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _verify(source: Source, progress: Progress) -> None:
    """Refuse NaN and Inf in any tensor of the model."""
    parameters = [*all_parameters(source.config)]
    stored = source.tensors()
    total = sum(stored[source.name(parameter)].nbytes for parameter in parameters)
    done = 0
    for parameter in parameters:
        name = source.name(parameter)
        raw = source.raw(name)
        for first in range(0, len(raw), _ROWS):
            if not np.isfinite(dequantize(np.ascontiguousarray(raw[first : first + _ROWS]), stored[name].type)).all():
                raise ConfigError(f"{source.path}: tensor {name!r} holds NaN or Inf")
        done += stored[name].nbytes
        progress("verifying weights", done, total)
