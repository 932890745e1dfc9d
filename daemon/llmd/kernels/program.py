"""`Program`: a model's step, recorded once as a list of operations over buffers of fixed size, and run by one call without the interpreter lock.

Recording reads like the module it stands for (see llama.py). A buffer holds a row of numbers for each token of a step, float32 or made for the
linear that reads it; `max_rows` tokens are computed at once, and a longer step goes through in slices inside the library, which changes no bit of it.
The body's operations see all new tokens; those after `select` see the rows whose logits are wanted. A program keeps what it points to alive, is used by
one thread at a time, and raises `KernelError` for what does not fit. ctypes and numpy only.

    program = Program(pool, Shape(...), frequencies)          # pool: Pool(threads); frequencies: float32 [head_dim / 2]
    record_llama(program, config, matrices, vectors)
    program.set_cache(slots)                                  # memory is taken as tokens come to lie in it
    results = Steps(program).step(batch, wanted)              # steps.py; or program.run(step) with arrays of one's own
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from llmd.kernels.packing import FORMATS, rows_read
from llmd.kernels.shared_library import Signatures, declare, library, why_absent

Floats = npt.NDArray[np.float32]

KV_TYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
#: Rows computed at once, and rows of logits.
MAX_ROWS: Final = 256
MAX_LOGITS: Final = 64
#: What time is measured by, in the order of src/program.h.
KINDS: Final = (
    *("embed", "rms_norm", "linear", "add_bias", "head_norm", "rope_store", "attention", "quantize", "swiglu", "gated"),
    *("pool", "select", "sample", "plan"),
)
_STATUS: Final = {
    -1: "an operation's buffers or weights do not fit together",
    -2: "the arrays of the step contradict each other",
    -3: "a token id is outside the vocabulary",
    -4: "a KV slot is outside the cache, or a page does not begin where tiles do",
    -5: "a wanted row, or an option of it, is out of range",
    -6: "no memory",
}
_ADD: Final = 1
#: Bytes that are preallocated between two words of progress.
_PREALLOCATED: Final = 2**30

_int, _int64, _float, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

SIGNATURES: Signatures = {
    "llmd_program_new": (_pointer, [_pointer, _pointer, _pointer]),
    "llmd_program_free": (None, [_pointer]),
    "llmd_program_buffer": (_int, [_pointer, _int, _int, _int]),
    "llmd_program_matrix": (_int, [_pointer, _pointer, _int, _int, _int]),
    "llmd_program_embed": (_int, [_pointer, _int, _int]),
    "llmd_program_rms_norm": (_int, [_pointer, _int, _pointer, _float, _int]),
    "llmd_program_linear": (_int, [_pointer, _int, _int, _int, _int]),
    "llmd_program_add_bias": (_int, [_pointer, _pointer, _int]),
    "llmd_program_head_norm": (_int, [_pointer, _pointer, _pointer, _float, _int]),
    "llmd_program_rope_store": (_int, [_pointer, _int, _int]),
    "llmd_program_attention": (_int, [_pointer, _int, _int, _int, _int]),
    "llmd_program_quantize": (_int, [_pointer, _int, _int]),
    "llmd_program_swiglu": (_int, [_pointer, _int, _int]),
    "llmd_program_gated": (_int, [_pointer, _int, _int, _int, _int]),
    "llmd_program_pool": (_int, [_pointer, _int, _pointer, _float]),
    "llmd_program_select": (_int, [_pointer, _int, _int]),
    "llmd_program_sample": (_int, [_pointer, _int]),
    "llmd_program_cache_bytes": (_int64, [_pointer, _int64]),
    "llmd_program_set_cache": (_int, [_pointer, _pointer, _int64]),
    "llmd_program_run": (_int, [_pointer, _pointer]),
    "llmd_program_rows_apart": (_int, [_pointer, _pointer]),
    "llmd_touch": (None, [_pointer, _int64, _int]),
    "llmd_program_timing": (None, [_pointer, _pointer]),
}


class KernelError(RuntimeError):
    """The library refused an operation or a step; nothing of the step may be used."""


class Shape(Struct, frozen=True, kw_only=True):
    """Sizes of a program. `vocab`: numbers of a row of logits; the first `sampled_ids` of them may be sampled."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    sampled_ids: int
    kv_type: str = "bfloat16"
    page_size: int = 16
    """Slots of one page; multiples of 16 are the fast case."""
    max_rows: int = MAX_ROWS
    max_logits: int = MAX_LOGITS
    rope_pairs: bool = True
    """Rotated pairs lie side by side (2i, 2i + 1), else half a head apart."""
    rope_scale: float = 1.0


class _Shape(ctypes.Structure):
    """src/step_plan.h's ProgramShape."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "layers", "vocab", "sampled_ids", "kv_type", "page_size")),
        *((name, ctypes.c_int32) for name in ("max_rows", "max_logits", "rope_pairs")),
        ("rope_scale", _float),
        ("reserved", ctypes.c_int32),
    )


class Step(ctypes.Structure):
    """src/step_plan.h's Step: sizes, then addresses of ForwardBatch's arrays, of LogitRows and of EmbedRows."""

    _fields_ = (
        *((name, _int64) for name in ("tokens", "requests", "logit_rows", "embed_rows")),
        *((name, _pointer) for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "extend_lens", "req_to_token")),
        *((name, _int64) for name in ("table_rows", "table_columns")),
        *((name, _pointer) for name in ("wanted", "embeds")),
    )


class Pool:
    """Threads for kernels: the caller and `threads` - 1 workers; worker i is bound to cpus[i % len(cpus)] where `cpus` is given."""

    def __init__(self, threads: int, cpus: Sequence[int] = (), spin: int = -1) -> None:
        self._library = library_or_raise()
        places = (_int * len(cpus))(*cpus) if cpus else None
        self.handle: int | None = self._library.llmd_pool_new(threads, places and ctypes.addressof(places), len(cpus), spin)
        if not self.handle:
            raise KernelError(f"no pool of {threads} threads")
        self.threads = threads

    def close(self) -> None:
        """End the workers. No program of this pool may run any more."""
        if self.handle:
            self._library.llmd_pool_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()


class Program:
    """See the module. Buffers and matrices are small integers; each method that records returns the buffer that it writes."""

    def __init__(self, pool: Pool, shape: Shape, frequencies: Floats) -> None:
        self._library = library_or_raise()
        declare(SIGNATURES)
        self.shape = shape
        self.pool = pool
        self.slots = 0
        self.cache: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """The bytes of all KV (src/kv.h says where what lies)."""
        self._handle: int | None = None
        self._kept: list[Any] = []
        self._widths: dict[int, int] = {}
        self._formats: dict[int, str] = {}
        self._outputs: dict[int, int] = {}
        self._tail = False
        if frequencies.shape != (shape.head_dim // 2,):
            raise KernelError(f"{frequencies.shape} frequencies for heads of {shape.head_dim}")
        sizes = _Shape(**{**{name: getattr(shape, name) for name in shape.__struct_fields__}, "kv_type": KV_TYPES[shape.kv_type]})
        self._handle = self._library.llmd_program_new(pool.handle, ctypes.addressof(sizes), self._address(frequencies))
        if not self._handle:
            raise KernelError(f"no program of {shape}")

    def close(self) -> None:
        """Give back buffers and cache."""
        if self._handle:
            self._library.llmd_program_free(self._handle)
            self._handle = None
            self._kept.clear()

    def __del__(self) -> None:
        self.close()

    # -- what operations work on --

    def matrix(self, data: npt.NDArray[np.uint8], format: str, n: int, k: int) -> int:
        """A packed matrix [n, k]; `data` stays mapped as long as the program lives."""
        self._kept.append(data)
        handle = self._check(self._library.llmd_program_matrix(self._handle, data.ctypes.data, FORMATS[format], n, k))
        self._formats[handle], self._outputs[handle] = format, n
        return handle

    def buffer(self, width: int, *, kind: int = 0) -> int:
        """A new buffer, of float32 or what packing.rows_read says; after `select`, of rows of logits."""
        handle = self._check(self._library.llmd_program_buffer(self._handle, width, kind, self._tail))
        self._widths[handle] = width
        return handle

    def input_of(self, matrix: int, width: int) -> int:
        """A new buffer of the kind that a linear with `matrix` reads."""
        return self.buffer(width, kind=rows_read(self._formats[matrix], width))

    # -- operations --

    def embed(self, matrix: int, out: int) -> int:
        """out = rows of `matrix` by token id."""
        return self._record("embed", matrix, out, out=out)

    def rms_norm(self, x: int, weight: Floats, eps: float, out: int) -> int:
        """out = x / rms(x) * weight, as `out` is."""
        return self._record("rms_norm", x, self._vector(weight, self._widths[x]), eps, out, out=out)

    def linear(self, x: int, matrix: int, out: int, *, add: bool = False) -> int:
        """out = x W^T, or out += x W^T."""
        return self._record("linear", x, matrix, out, _ADD if add else 0, out=out)

    def add_bias(self, bias: Floats, out: int) -> int:
        """out += bias"""
        return self._record("add_bias", self._vector(bias, self._widths[out]), out, out=out)

    def head_norm(self, q_weight: Floats, k_weight: Floats, eps: float, qkv: int) -> int:
        """Norm of each head of q and of k, in place."""
        dim = self.shape.head_dim
        return self._record("head_norm", self._vector(q_weight, dim), self._vector(k_weight, dim), eps, qkv, out=qkv)

    def rope_store(self, layer: int, qkv: int) -> int:
        """Rotate q and k in place; k and v into the cache."""
        return self._record("rope_store", layer, qkv, out=qkv)

    def attention(self, qkv: int, layer: int, out: int, *, window: int = 0) -> int:
        """out [heads * head_dim] = attention of q over the request's cache, each token's own position included."""
        return self._record("attention", qkv, layer, window, out, out=out)

    def quantize(self, x: int, out: int) -> int:
        """x in the form that the linear reads for which `out` is."""
        return self._record("quantize", x, out, out=out)

    def swiglu(self, gate_up: int, out: int) -> int:
        """out = silu(gate) * up, as `out` is."""
        return self._record("swiglu", gate_up, out, out=out)

    def gated(self, x: int, matrix: int, middle: int, out: int) -> int:
        """out = silu(gate) * up of x W^T, as `out` is. `middle`: a buffer as wide as W has outputs, for kernels that need it."""
        return self._record("gated", x, matrix, middle, out, out=out)

    def pool_embeddings(self, x: int, weight: Floats, eps: float) -> None:
        """The step's EmbedRows = sums of the normed rows of x."""
        self._record("pool", x, self._vector(weight, self._widths[x]), eps, out=x)

    def select(self, x: int) -> int:
        """A new buffer with the rows of x whose logits are wanted. What is recorded from here on works on such rows."""
        self._tail = True
        out = self.buffer(self._widths[x])
        return self._record("select", x, out, out=out)

    def sample(self, logits: int) -> None:
        """The step's LogitRows: choices and log-probabilities."""
        self._record("sample", logits, out=logits)

    # -- running --

    def cache_bytes(self, slots: int) -> int:
        """Bytes of a KV cache of so many token slots."""
        return int(self._library.llmd_program_cache_bytes(self._handle, slots))

    def set_cache(self, slots: int) -> None:
        """A new, empty cache. Its pages take memory when they are first written. A bad size or no memory: KernelError."""
        try:
            memory = mmap.mmap(-1, self.cache_bytes(slots), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
        except (OSError, ValueError, OverflowError) as error:
            raise KernelError(f"no KV cache of {slots} slots: {error}") from None
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.cache = np.frombuffer(memory, dtype=np.uint8)
        self._check(self._library.llmd_program_set_cache(self._handle, self.cache.ctypes.data, slots))
        self.slots = slots

    def preallocate(self, progress: Callable[[int], None]) -> None:
        """Take the memory of the cache, which is empty, now. `progress` is told again and again how many bytes are there."""
        for begin in range(0, self.cache.nbytes, _PREALLOCATED):
            size = min(_PREALLOCATED, self.cache.nbytes - begin)
            self._library.llmd_touch(self.cache.ctypes.data + begin, size, self.pool.threads)
            progress(begin + size)

    def take(self, begin: int, end: int) -> None:
        """Take the memory of token slots begin..end (exclusive) now. No step may run, and what lies in them is lost."""
        first, last = self.cache_bytes(begin), self.cache_bytes(end)
        self._library.llmd_touch(self.cache.ctypes.data + first, last - first, 1)

    def run(self, step: Step) -> None:
        """The whole step; the arrays that it points to are the caller's to keep. Raises KernelError."""
        self._check(self._library.llmd_program_run(self._handle, ctypes.addressof(step)))

    def rows_apart(self, step: Step) -> int:
        """Rows of the slices that each thread would take for itself in such a step; 0: all threads would share each operation."""
        return int(self._library.llmd_program_rows_apart(self._handle, ctypes.addressof(step)))

    def timing(self) -> dict[str, float]:
        """Seconds of each kind of operation since the last call. The first call turns measuring on."""
        found = (ctypes.c_double * len(KINDS))()
        self._library.llmd_program_timing(self._handle, ctypes.addressof(found))
        return {kind: value * 1e-9 for kind, value in zip(KINDS, found, strict=True)}

    def _record(self, name: str, *arguments: Any, out: int) -> int:
        self._check(getattr(self._library, f"llmd_program_{name}")(self._handle, *arguments), name)
        return out

    def _check(self, status: int, name: str = "") -> int:
        if status < 0:
            raise KernelError(f"{name}: {_STATUS[status]}" if name else _STATUS[status])
        return status

    def _vector(self, values: Floats, width: int) -> int:
        if values.shape != (width,):
            raise KernelError(f"a vector of {values.shape} where {width} numbers are needed")
        return self._address(values)

    def _address(self, values: Floats) -> int:
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        self._kept.append(values)
        return values.ctypes.data


def library_or_raise() -> ctypes.CDLL:
    """The kernels. Raises KernelError where there are none."""
    lib = library()
    if lib is None:
        raise KernelError(why_absent() or "no native kernels")
    return lib
