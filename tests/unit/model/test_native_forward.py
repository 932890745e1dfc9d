"""The native forward pass against the torch reference over the same weights, and against itself: a row's bits do not depend on its company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmd.kernels.shared_library import library
from llmd.model.batch import EmbedRequest
from llmd.wire.messages import Pooling, SamplingParams
from tests.models import boot_for, gguf_of, random_llama
from tests.stepping import NativeStepper, Stepper, Steps

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

KNOWN = 261
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "mistral-window": {"family": "mistral", "sliding_window": 8},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen2-window": {"family": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"family": "qwen3"},
    "odd": {"hidden_size": 70, "intermediate_size": 37, "heads": 5, "kv_heads": 5, "layers": 3},
    "head-24": {"head_dim": 24},
    "wide": {"hidden_size": 1030},
}
EMBEDDED = {"hidden_size": 576, "intermediate_size": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "layers": 1, "tied": True}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, count)]


def native(path: Path, cache: Path, *, page_size: int = 16, context: int = 256, requests: int = 8, seed: int = 0, **args: Any) -> NativeStepper:
    boot = boot_for(path, cache, **{"dtype": "float32", **args})
    return NativeStepper(boot, page_size=page_size, context=context, requests=requests, seed=seed, tokenizer_size=KNOWN)


def table(steps: Steps, new: dict[int, list[int]]) -> dict[int, list[tuple[int, float]]]:
    """Each row's log-probabilities of all ids, most likely first: equal tables are equal logits."""
    return {row: [*result.top] for row, result in steps.step(new, logprobs=KNOWN).items()}


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_the_references(tmp_path: Path, variant: str, page_size: int) -> None:
    path = random_llama(tmp_path / "m", **VARIANTS[variant])
    reference = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"))
    stepper = native(path, tmp_path / "cache", page_size=page_size)
    ids = tokens(70)
    assert stepper.prompt_logprobs(1, ids) == pytest.approx(reference.prompt_logprobs(1, ids), abs=1e-4, rel=1e-5)
    for start, end in ((0, 20), (20, 21), (21, 50), (50, 69), (69, 70)):
        (expected,), (found,) = (steps.step({3: ids[start:end]}, logprobs=3).values() for steps in (reference, stepper))
        assert [id for id, _ in found.top] == [id for id, _ in expected.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-4, rel=1e-5)


def test_mixed_batches_equal_the_references(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    reference = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"), context=1024)
    stepper = native(path, tmp_path / "cache", context=1024)
    prompts = {row: tokens(length, row) for row, length in enumerate((1, 5, 900, 64, 17, 300, 900), 1)}
    for new in (
        {row: ids[: len(ids) // 2] for row, ids in prompts.items() if len(ids) > 1},
        {row: ids[len(ids) // 2 :] for row, ids in prompts.items()},
        {row: [65] for row in prompts},
    ):
        expected, found = reference.step(new, logprobs=0), stepper.step(new, logprobs=0)
        for row in new:
            assert found[row].token_id == expected[row].token_id
            assert found[row].logprob == pytest.approx(expected[row].logprob, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized_weights_stay_near_their_dequantized_selves(tmp_path: Path, kind: str) -> None:
    """What is left is the rounding of activations to 8 bits."""
    path = gguf_of(random_llama(tmp_path / "m", hidden_size=256, intermediate_size=512), tmp_path / "m.gguf", kind)
    reference = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"), tokenizer_size=KNOWN)
    stepper = native(path, tmp_path / "cache", dtype="auto", kv_cache_dtype="float32")
    assert stepper.model.quantization == kind.lower()
    ids = tokens(200)
    expected = reference.step({1: ids}, logprobs=1, prompt_logprob_ids=ids[1:])[1].prompt_logprobs
    found = stepper.step({1: ids}, logprobs=1, prompt_logprob_ids=ids[1:])[1].prompt_logprobs
    assert expected is not None and found is not None
    error = np.abs(np.array([value for value, _ in found]) - np.array([value for value, _ in expected]))
    assert error.mean() < 0.05 and error.max() < 0.5
    same = [one[0][0] == other[0][0] for (_, one), (_, other) in zip(found, expected, strict=True)]
    assert sum(same) > 0.93 * len(same)


@pytest.mark.parametrize(
    ("args", "mean"),
    [
        ({"kv_cache_dtype": "bfloat16"}, 0.02),
        ({"kv_cache_dtype": "int8"}, 0.05),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 0.02),
        ({"dtype": "float16", "kv_cache_dtype": "float32"}, 0.01),
        ({"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "float32"}, 0.1),
        ({"dtype": "auto", "quantization": "int4", "kv_cache_dtype": "float32"}, 1.0),
    ],
)
def test_smaller_types_stay_near(tmp_path: Path, args: dict[str, str], mean: float) -> None:
    path = random_llama(tmp_path / "m")
    ids = tokens(150)
    exact = np.array(native(path, tmp_path / "cache").prompt_logprobs(1, ids))
    found = np.array(native(path, tmp_path / "cache", **args).prompt_logprobs(1, ids))
    assert 0 < np.abs(found - exact).mean() < mean


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("length", [1, 17, 300])
def test_vectors_equal_the_references(tmp_path: Path, pooling: Pooling, length: int) -> None:
    path = random_llama(tmp_path / "m")
    steps = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"), context=512), native(path, tmp_path / "cache", context=512)
    vectors = []
    for one in steps:
        embed = EmbedRequest(1, pooling)
        assert one.embed({4: [1, 2, 3], 1: tokens(length)}, [embed]) == []
        assert embed.vector is not None and embed.vector.dtype == np.float32
        vectors.append(embed.vector)
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4 * (length if pooling == "mean" else 1))


# ---------------------------------------------------------------- against itself

TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
    "int4": {"dtype": "auto", "quantization": "int4"},
    "kv-bfloat16": {"kv_cache_dtype": "bfloat16"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("types", TYPES)
def test_a_row_is_the_same_in_any_company(tmp_path: Path, types: str, page_size: int) -> None:
    path = random_llama(tmp_path / "m", **(EMBEDDED if types in ("float32", "int4") else {}))
    one = native(path, tmp_path / "cache", page_size=page_size, context=512, requests=12, **TYPES[types])
    other = native(path, tmp_path / "cache", page_size=page_size, context=512, requests=12, seed=1, threads=2, **TYPES[types])
    ids, rest = tokens(300), tokens(12, 1)
    alone = [table(one, {1: ids})[1], *(table(one, {1: [id]})[1] for id in rest)]
    others = {row: tokens(length, row) for row, length in ((3, 1), (4, 130), (5, 17), (6, 401))}
    other.step({3: others[3], 4: others[4], 2: ids[:63]})
    other.step({2: ids[63:64], 3: [5], 5: others[5]})
    other.step({4: [7], 6: others[6], 2: ids[64:200], 3: [9]})
    found = [table(other, {3: [1], 2: ids[200:], 5: [8]})[2]]
    for index, id in enumerate(rest):
        found.append(table(other, {row: [index] for row in (6, 3, 4)[: index % 4]} | {2: [id]} | {5: [3] * (1 + index % 3)})[2])
    for index, pair in enumerate(zip(alone, found, strict=True)):
        assert pair[0] == pair[1], f"token {index}"
    # Its prompt once more, over KV that another step has written.
    one.req_to_token[7, :256], one.lengths[7] = one.req_to_token[1, :256], 256
    assert table(one, {7: ids[256:], 8: tokens(20, 8)})[7] == alone[0]


@pytest.mark.parametrize("count", [2, 3, 8, 31, 64])
@pytest.mark.parametrize("types", ["float32", "int4"])
def test_decoding_in_batches_of_any_size(tmp_path: Path, types: str, count: int) -> None:
    path = random_llama(tmp_path / "m", **EMBEDDED)
    stepper = native(path, tmp_path / "cache", requests=count, context=64, threads=2, **TYPES[types])
    prompts = {row: tokens(1 + row % 40, row) for row in range(1, count + 1)}
    alone = {}
    for row, ids in prompts.items():
        stepper.step({row: ids})
        alone[row] = table(stepper, {row: [row % 256]})[row]
    stepper.lengths[:] = 0
    stepper.step(prompts)
    assert table(stepper, {row: [row % 256] for row in prompts}) == alone


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_lay_in_the_cache_before_is_never_seen(tmp_path: Path, page_size: int, kv: str) -> None:
    path = random_llama(tmp_path / "m")
    clean, stepper = (native(path, tmp_path / "cache", page_size=page_size, kv_cache_dtype=kv) for _ in range(2))
    stepper.runner.program.cache[:] = 0xFF
    for new in ({1: tokens(9), 2: tokens(33)}, {1: [1], 2: [2]}, {2: tokens(20, 2)}):
        results = stepper.step(new, logprobs=KNOWN)
        assert all(result.finite for result in results.values())
        assert {row: [*result.top] for row, result in results.items()} == table(clean, new)


def test_the_cache_takes_memory_as_it_is_used(tmp_path: Path) -> None:
    stepper = native(random_llama(tmp_path / "m"), tmp_path / "cache", context=65_536, requests=64)
    assert stepper.runner.program.cache.nbytes > 2**30
    before = resident()
    stepper.step({1: tokens(40)})
    assert resident() - before < 64 * 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def stepper(tmp_path: Path) -> NativeStepper:
    return native(random_llama(tmp_path / "m"), tmp_path / "cache")


def test_ids_that_the_tokenizer_lacks_are_never_chosen(stepper: NativeStepper) -> None:
    assert all(id < KNOWN for id, _ in table(stepper, {1: [3]})[1])
    assert len(table(stepper, {1: [3]})[1]) == KNOWN


def test_nothing_wanted_gives_nothing_and_still_writes(stepper: NativeStepper, tmp_path: Path) -> None:
    ids = tokens(30)
    whole = table(native(tmp_path / "m", tmp_path / "cache"), {1: ids})[1]
    assert stepper.runner.step(stepper.batch({1: ids[:20]}), []) == []
    assert table(stepper, {1: ids[20:]})[1] == whole


def test_sampling_is_a_function_of_seed_and_position(stepper: NativeStepper) -> None:
    def draw(rows: dict[int, int], seed: int) -> list[int]:
        stepper.lengths[:] = 0
        sampling = SamplingParams(max_new_tokens=1, temperature=1.0, seed=seed, top_p=0.9)
        return [result.token_id for result in stepper.step({row: [id] for row, id in rows.items()}, sampling=sampling).values()]

    assert draw({1: 5}, 3) == draw({1: 5}, 3) == draw({4: 9, 2: 5}, 3)[1:]
    assert len({draw({1: 5}, seed)[0] for seed in range(40)}) > 5
