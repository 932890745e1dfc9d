"""Where a step's time goes: `python -m tests.bench.bench_step [MODEL.gguf]`. Each kind of operation, its best of several steps, in milliseconds.

Decode of 1, 16 and 64 streams with 256 tokens each, and a prompt of 1,504 tokens; no HTTP and no scheduler. `python` is what is outside the library.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from llmd.model.batch import SampleRequest
from llmd.model.native_loader import NativeModel
from llmd.wire.messages import SamplingParams
from tests.models import boot_for
from tests.programs import ProgramStepper, load

EMBEDDED = Path.home() / ".cache/llmd/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT, PROMPT = 256, 1504
KV_TYPES = ("bfloat16", "int8")
THREADS = 2


def ids(count: int, seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 40_000, count)]


def measure(model: NativeModel, kv_type: str, streams: int, new: int, steps: int) -> dict[str, float]:
    """Seconds of each kind, and `whole`: the minimum over the steps of each."""
    context = (max(CONTEXT, new) + 79) // 16 * 16
    stepper = ProgramStepper(model, threads=THREADS, kv_type=kv_type, sampled_ids=model.config.vocab_size, requests=streams, context=context)
    rows = range(1, streams + 1)
    if new == 1:
        for row in rows:
            stepper.step({row: ids(CONTEXT, row)})
    stepper.program.timing()
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    best: dict[str, float] = {}
    for index in range(steps):
        stepper.lengths[1:] = CONTEXT if new == 1 else 0
        batch = stepper.batch({row: ids(new, index) for row in rows})
        start = time.perf_counter()
        stepper.runner.step(batch, [SampleRequest(row=row - 1, sampling=greedy, position=0) for row in rows])
        found = {"whole": time.perf_counter() - start, **stepper.program.timing()}
        found["python"] = found["whole"] - sum(seconds for kind, seconds in found.items() if kind != "whole")
        best = {kind: min(seconds, best.get(kind, seconds)) for kind, seconds in found.items()}
    return best


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else EMBEDDED
    with tempfile.TemporaryDirectory() as cache:
        model = load(boot_for(path, Path(cache)))
        for kv_type in KV_TYPES:
            for streams, new, steps in ((1, 1, 50), (16, 1, 30), (64, 1, 15), (1, PROMPT, 5)):
                found = measure(model, kv_type, streams, new, steps)
                what = f"{streams} x {CONTEXT}" if new == 1 else f"prompt {new}"
                parts = " ".join(f"{kind} {seconds * 1e3:.2f}" for kind, seconds in found.items() if kind != "whole" and seconds > 1e-5)
                print(f"{kv_type:9} {what:12} {found['whole'] * 1e3:8.2f} ms {streams * new / found['whole']:7.0f} tokens/s: {parts}", flush=True)


if __name__ == "__main__":
    main()
