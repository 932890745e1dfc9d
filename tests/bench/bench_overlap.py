"""How long compute idles between two steps, with overlap and without: `python -m tests.bench.bench_overlap [STREAMS [TOKENS]]`.

By the native kernels where they are; `LLMD_ISA=torch` measures torch. The scheduler's own loop over the embedded model, in this
process; what it sends is encoded and dropped. The share is that of the time between the end of one step's computing and the begin of
the next, in all time from the first decode step to the last.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Read once, when the libraries are loaded; as in the plan.
os.environ |= {"MKL_CBWR": "AUTO,STRICT", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}

from llmd.model import native
from llmd.model.batch import ForwardBatch, Runner, SampleRequest, SampleResult
from llmd.model.loader import load_model
from llmd.model.native_loader import load_native
from llmd.model.native_runner import NativeRunner
from llmd.model.runner import ModelRunner
from llmd.plan.spec import Boot
from llmd.sampling.sampler import Sampler
from llmd.scheduler.kv import KvManager
from llmd.wire.codec import encode
from llmd.wire.messages import BatchTokenIDOutput, TokenChunk
from tests.models import boot_for
from tests.unit.scheduler.harness import Bench, FakeOutput

THREADS = 2


class Timed:
    """Keeps begin and end of each step of decoding requests."""

    def __init__(self, runner: Runner, spans: list[tuple[float, float]]) -> None:
        self._runner, self._spans = runner, spans

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        began = time.perf_counter()
        results = self._runner.step(batch, wanted)
        if batch.extend_lens.max() == 1:
            self._spans.append((began, time.perf_counter()))
        return results


class Encoding(FakeOutput):
    """What the real one does up to its socket."""

    def chunks(self, chunks: list[TokenChunk]) -> None:
        super().chunks(chunks)
        encode(BatchTokenIDOutput(epoch=1, chunks=chunks))


def runner_maker(boot: Boot) -> Callable[[KvManager], Runner]:
    """Of the native kernels where they serve, else of torch."""
    size = boot.files.tokenizer_size
    if native.why_not() is None:
        packed = load_native(boot, lambda stage, done, total: None)
        return lambda kv: NativeRunner(packed, kv.pages.num_slots, kv.pages.page_size, "bfloat16", THREADS, size)
    model = load_model(boot, lambda stage, done, total: None)
    return lambda kv: ModelRunner(model, kv.pages.num_slots, Sampler(size))


def measure(make: Callable[[KvManager], Runner], size: int, streams: int, tokens: int, *, overlap: bool) -> list[list[int]]:
    """Print one line; returns the tokens."""

    def runner(kv: KvManager) -> Runner:
        return Timed(make(kv), spans)

    spans: list[tuple[float, float]] = []
    bench = Bench(pages=streams * 32, page_size=16, max_running=streams, context=512, chunk=512, vocab=size, runner=runner, overlap=overlap)
    bench.check = lambda: None  # type: ignore[method-assign]
    bench.out = bench.scheduler._output = Encoding()  # type: ignore[assignment]
    for number in range(streams):
        bench.send(f"r{number}", [7 + number * 13 + i for i in range(32)], tokens, ignore_eos=True, seed=number, temperature=0.8 * (number % 2), top_p=0.95)
    bench.run()
    bench.close()
    full = spans[streams:-streams]
    total = full[-1][1] - full[0][0]
    idle = total - sum(end - began for began, end in full)
    name = "on" if overlap else "off"
    step = total / len(full)
    gap = f"compute idles {idle / total:6.2%}, {idle / len(full) * 1e6:5.0f} us of {step * 1e3:6.2f} ms a step"
    print(f"overlap {name:3}: {streams / step:6.1f} tokens/s, {gap}", flush=True)
    return [bench.out.tokens[f"r{number}"] for number in range(streams)]


def main() -> None:
    streams, tokens = (int(given) for given in (sys.argv[1:] + ["16", "100"][len(sys.argv) - 1 :])[:2])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmd"
    boot = boot_for(Path("smollm2-135m-instruct"), cache)
    make = runner_maker(boot)
    print(f"{streams} streams, {boot.files.kernels or 'torch'}")
    found = [measure(make, boot.files.tokenizer_size, streams, tokens, overlap=overlap) for overlap in (False, True, False, True)]
    print("tokens are identical" if all(tokens == found[0] for tokens in found) else "TOKENS DIFFER")


if __name__ == "__main__":
    main()
