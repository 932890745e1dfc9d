"""What each quantization costs in accuracy: `python -m tests.bench.bench_accuracy [MODEL]` prints a table in Markdown.

On tests/data/public_domain.txt, in windows of 1,024 tokens: perplexity; how often the most likely token is that of float32; how far
log-probabilities are off at every 32nd token, over the whole vocabulary. Then how many of 64 tokens of a greedy continuation come before
the first that float32 would not have chosen, on average. Not a measure of speed.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from llmd.plan.spec import Boot
from llmd.tokenizer.load import load_tokenizer
from tests.models import boot_for
from tests.stepping import NativeStepper

TEXT = Path(__file__).parents[1] / "data" / "public_domain.txt"
WINDOW = 1024
EVERY = 32
PROMPT, CONTINUATION = 64, 64

#: Name -> settings of the section `model`; the first is what the others are compared with.
SETTINGS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "float32, KV bfloat16": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "float32, KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16", "kv_cache_dtype": "float32"},
    "float16": {"quantization": "none", "dtype": "float16", "kv_cache_dtype": "float32"},
    "as stored": {"kv_cache_dtype": "float32"},
    "as stored, KV bfloat16 (the default)": {"kv_cache_dtype": "bfloat16"},
    "as stored, KV int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "float32"},
}


@dataclass
class Found:
    """One setting's answers."""

    logprobs: npt.NDArray[np.float64]
    """[N] of the text's own tokens."""
    best: npt.NDArray[np.int64]
    """[N] most likely ids."""
    tables: npt.NDArray[np.float32]
    """[samples, vocabulary] log-probabilities."""
    continuations: list[list[int]]
    mib: float

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean())


def measure(boot: Boot, ids: list[int]) -> Found:
    """Run the text through one setting."""
    stepper = NativeStepper(boot, requests=4, context=WINDOW + CONTINUATION, page_size=16)
    logprobs: list[float] = []
    best: list[int] = []
    tables: list[npt.NDArray[np.float32]] = []
    continuations: list[list[int]] = []
    vocabulary = boot.files.tokenizer_size
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start : start + WINDOW]
        if len(window) < 2 * PROMPT:
            break
        stepper.lengths[:] = 0
        prompt = stepper.step({1: window}, logprobs=1, prompt_logprob_ids=window[1:])[1].prompt_logprobs
        assert prompt is not None
        logprobs += [value for value, _ in prompt]
        best += [top[0][0] for _, top in prompt]
        tables += [_table(stepper, window, at, vocabulary) for at in range(EVERY, len(window), EVERY)]
        continuations.append(_continue(stepper, window[:PROMPT]))
    return Found(np.array(logprobs), np.array(best), np.stack(tables), continuations, stepper.model.weights_bytes / 2**20)


def _table(stepper: NativeStepper, window: list[int], at: int, vocabulary: int) -> npt.NDArray[np.float32]:
    """Log-probabilities of all ids after window[:at + 1]: its last token once more, over the KV of those before."""
    stepper.lengths[1] = at
    top = stepper.step({1: [window[at]]}, logprobs=vocabulary)[1].top
    table = np.empty(vocabulary, dtype=np.float32)
    table[[id for id, _ in top]] = [value for _, value in top]
    return table


def _continue(stepper: NativeStepper, prompt: list[int]) -> list[int]:
    stepper.lengths[2] = 0
    tokens = [stepper.step({2: prompt})[2].token_id]
    while len(tokens) < CONTINUATION:
        tokens.append(stepper.step({2: tokens[-1:]})[2].token_id)
    return tokens


def same_until(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def main(model: str) -> None:
    """Print the table."""
    cache = Path.home() / ".cache" / "llmd"
    with tempfile.TemporaryDirectory() as packs:
        print(f"| {Path(model).name} | weights, MiB | perplexity | same best token | mean error | largest error | same greedy tokens of {CONTINUATION} |")
        print("|---|---|---|---|---|---|---|")
        reference: Found | None = None
        for name, settings in SETTINGS.items():
            boot = replace(boot_for(Path(model), cache, threads=2, **settings), cache_dir=packs)
            text = load_tokenizer(Path(boot.files.small_dir)).encode(TEXT.read_text(), add_special_tokens=False)
            found = measure(boot, text)
            reference = reference or found
            error = np.abs(found.tables - reference.tables)
            same = np.mean([same_until(*pair) for pair in zip(found.continuations, reference.continuations, strict=True)])
            print(
                f"| {name} | {found.mib:.0f} | {found.perplexity:.3f} | {100 * np.mean(found.best == reference.best):.2f} % "
                f"| {error.mean():.4f} | {error.max():.3f} | {same:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
