"""The linears of SmolLM2-135M on the native kernels: `python -m tests.bench.bench_kernels [THREADS] [FORMAT]...`.

Tokens a second if a step were nothing but its linears (q, k, v as one matrix, gate and up as one; the head in 8 bits where the others are quantized) and the
quantizing of what goes into them, for M rows in a step. Each of 30 layers has weights of its own, as in the model. Of each operation the shortest time counts,
less what the call from Python takes: a busy machine lengthens some, hardly all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from llmd.kernels.packing import FORMATS, QUANTIZED, packed_size, rows_read
from llmd.kernels.shared_library import isa_name, library, why_absent

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, HEAD_PARTS = 30, 576, 1536, 49152, 16
SHAPES = {"qkv": (960, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
ROWS = (1, 4, 16, 64, 256)


class Arena:
    """Memory for all weights, in huge pages as the runner keeps them: without them memory is a third slower."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.free = np.frombuffer(memory, dtype=np.uint8)

    def matrix(self, lib: ctypes.CDLL, format: str, n: int, k: int) -> int:
        """Where a packed matrix [n, k] of small numbers begins."""
        data, self.free = np.split(self.free, [packed_size(format, n, k)])
        part = 32  # rows are packed once and repeated
        rows = np.random.default_rng(0).standard_normal((part, k)).astype(np.float32) * 0.05
        kind, source = ("Q4_0", np.full((part, k // 32, 18), 7, dtype=np.uint8)) if format == "Q4_0" else ("F32", rows)
        assert lib.llmd_pack(data.ctypes.data, FORMATS[format], part, k, 0, part, source.ctypes.data, FORMATS[kind]) == 0
        piece = packed_size(format, part, k)
        data[piece:] = np.tile(data[:piece], -(-data.size // piece))[: data.size - piece]
        return int(data.ctypes.data)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Bench:
    """One format's weights, and the shortest times of its operations."""

    def __init__(self, lib: ctypes.CDLL, pool: int, format: str) -> None:
        self.lib, self.pool, self.format = lib, pool, format
        self.head_format = "Q8_0" if format in QUANTIZED else format
        head = (VOCABULARY, HIDDEN)
        self.arena = Arena(LAYERS * sum(packed_size(format, *shape) for shape in SHAPES.values()) + packed_size(self.head_format, *head))
        self.layers = [{name: self.arena.matrix(lib, format, *shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.head = self.arena.matrix(lib, self.head_format, *head)

    def step_seconds(self, m: int) -> float:
        lib, pool, kind = self.lib, self.pool, rows_read(self.format, HIDDEN)
        x = np.random.default_rng(1).standard_normal((m, INTERMEDIATE)).astype(np.float32)
        y = np.zeros((m, VOCABULARY // HEAD_PARTS), dtype=np.float32)
        q = np.zeros(int(lib.llmd_quant_rows_size(m, INTERMEDIATE, max(1, kind))) + 64, dtype=np.uint8)
        xp, yp, qp = x.ctypes.data, y.ctypes.data, q.ctypes.data + -q.ctypes.data % 64
        best: dict[str, float] = {}

        def note(name: str, call: Callable[[], object]) -> None:
            best[name] = min(best.get(name, 1.0), timed(call))

        def linear(name: str, data: int, format: str, n: int, k: int, rows: int = m) -> None:
            note(name, lambda: lib.llmd_linear(pool, data, FORMATS[format], n, k, qp if kind else xp, INTERMEDIATE, rows, yp, y.shape[1], 0))

        part, stride = VOCABULARY // HEAD_PARTS, packed_size(self.head_format, VOCABULARY, HIDDEN) // HEAD_PARTS
        for i in range(60 if m <= 16 else 15):
            for layer in self.layers[:: 1 if m <= 16 else 2]:
                for name, (n, k) in SHAPES.items():
                    if kind:
                        note(f"quantize {k}", lambda k=k: lib.llmd_quantize_rows(pool, xp, INTERMEDIATE, m, k, kind, qp))
                    linear(name, layer[name], self.format, n, k)
            if kind:
                lib.llmd_quantize_rows(pool, xp, INTERMEDIATE, m, HIDDEN, kind, qp)
            linear("call", self.head, self.head_format, part, HIDDEN, rows=0)
            linear("head", self.head + stride * (i % HEAD_PARTS), self.head_format, part, HIDDEN)
        net = {name: seconds - best["call"] for name, seconds in best.items()}
        quantizing = 3 * net["quantize 576"] + net["quantize 1536"] if kind else 0.0
        return LAYERS * (sum(net[name] for name in SHAPES) + quantizing) + HEAD_PARTS * net["head"]


def main() -> None:
    lib = library()
    if lib is None:
        sys.exit(why_absent())
    arguments = sys.argv[1:]
    threads = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else len(os.sched_getaffinity(0))
    pool = lib.llmd_pool_new(threads, None, 0, -1)
    print(f"{isa_name(lib)}, {threads} threads; tokens/s   " + "".join(f"{f'M={m}':>8}" for m in ROWS))
    for format in arguments or [name for name in FORMATS if name != "Q4_0"]:
        bench = Bench(lib, pool, format)
        print(f"{format:<28}  " + "".join(f"{m / bench.step_seconds(m):8.0f}" for m in ROWS), flush=True)
    lib.llmd_pool_free(pool)


if __name__ == "__main__":
    main()
