"""The forward pass gives transformers' logits, however a prompt is cut into steps and wherever its slots lie."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import VOCAB, boot_for, gguf_of, permutation, permutation_llama, random_llama
from tests.stepping import Stepper

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
    "theta": {"rope_theta": 500000.0},
    "mistral-window": {"family": "mistral", "sliding_window": 8},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen2-window": {"family": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"family": "qwen3"},
    "sharded": {"shards": 3},
}


def reference(path: Path) -> Callable[[list[int]], np.ndarray]:
    """ids -> log-probabilities [N, vocabulary the tokenizer knows] of transformers' model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(ids: list[int]) -> np.ndarray:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model(torch.tensor([ids])).logits[0, :, :261].float()
            table: np.ndarray = torch.log_softmax(logits, dim=-1).numpy()
            return table

    return forward


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, count)]


def of_prompt(table: np.ndarray, ids: list[int]) -> list[float]:
    return [float(table[index, id]) for index, id in enumerate(ids[1:])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_transformers(tmp_path: Path, variant: str) -> None:
    path = random_llama(tmp_path / "m", **VARIANTS[variant])
    stepper = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"))
    ids = tokens(70)
    expected = reference(path)(ids)
    assert stepper.prompt_logprobs(1, ids) == pytest.approx(of_prompt(expected, ids), abs=1e-4), "prefill"
    stepper.step({2: ids[:33]})
    for index in range(33, len(ids)):
        result = stepper.step({2: [ids[index]]}, logprobs=0)[2]
        assert result.token_id == expected[index].argmax()
        assert result.logprob == pytest.approx(expected[index].max(), abs=1e-4), f"decode at {index}"
    for start, end in ((0, 20), (20, 21), (21, 50), (50, 70)):
        result = stepper.step({3: ids[start:end]}, logprobs=0)[3]
        assert result.logprob == pytest.approx(expected[end - 1].max(), abs=1e-4), f"chunk {start} to {end}"


def test_mixed_batches_equal_each_request_alone(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    stepper = Stepper(boot_for(path, tmp_path / "cache", dtype="float32"), context=1024)
    prompts = {row: tokens(length, row) for row, length in enumerate((1, 5, 900, 64, 17, 300, 900), 1)}
    forward = reference(path)
    expected = {row: forward(ids) for row, ids in prompts.items()}
    for row, ids in prompts.items():
        stepper.step({row: ids[: len(ids) // 2]} if len(ids) > 1 else {8: [0]})
    rest = {row: ids[len(ids) // 2 :] for row, ids in prompts.items()}
    for row in (2, 6):  # some take one token in this step and prefill goes on beside them
        first, rest[row] = rest[row][:-1], rest[row][-1:]
        stepper.step({row: first})
    for row, result in stepper.step(rest, logprobs=0).items():
        assert result.logprob == pytest.approx(expected[row][-1].max(), abs=1e-4), f"row {row}"
    following = {row: [65] for row in prompts}
    for row, result in stepper.step(following, logprobs=0).items():
        table = forward([*prompts[row], 65])
        assert result.token_id == table[-1].argmax()
        assert result.logprob == pytest.approx(table[-1].max(), abs=1e-4), f"decode of row {row}"


def test_unwritten_slots_are_never_seen(tmp_path: Path) -> None:
    stepper = Stepper(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32"))
    for layer in stepper.runner.cache.layers:
        layer.fill_(float("nan"))
    stepper.req_to_token[1:, 10:] = 0
    results = stepper.step({1: tokens(9), 2: tokens(3)}) | stepper.step({1: [1], 2: [2]})
    assert all(result.finite for result in results.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_its_checkpoint(tmp_path: Path, family: str) -> None:
    checkpoint = random_llama(tmp_path / "m", family=family)
    one = Stepper(boot_for(checkpoint, tmp_path / "cache", dtype="float32"))
    other = Stepper(boot_for(gguf_of(checkpoint, tmp_path / "m.gguf"), tmp_path / "cache", dtype="float32"), tokenizer_size=261)
    ids = tokens(50)
    assert other.prompt_logprobs(1, ids) == pytest.approx(one.prompt_logprobs(1, ids), abs=1e-5)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_checkpoints(tmp_path: Path, dtype: str) -> None:
    path = random_llama(tmp_path / "m", dtype=dtype)
    ids = tokens(40)
    found = Stepper(boot_for(path, tmp_path / "cache", dtype="float32")).prompt_logprobs(1, ids)
    assert found == pytest.approx(of_prompt(reference(path)(ids), ids), abs=1e-4)


@pytest.mark.parametrize("args", [{"kv_cache_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "auto"}])
def test_other_types_stay_near(tmp_path: Path, args: dict[str, str]) -> None:
    path = random_llama(tmp_path / "m")
    ids = tokens(40)
    found = Stepper(boot_for(path, tmp_path / "cache", **{"dtype": "float32", **args})).prompt_logprobs(1, ids)
    assert np.abs(np.array(found) - np.array(of_prompt(reference(path)(ids), ids))).mean() < 0.15


def test_permutation_llama_says_what_it_is_told(tmp_path: Path) -> None:
    cycles = [[97, 98, 0xF0, 0x9F, 0x98, 0x80, 257], [259, 72, 105]]
    path = permutation_llama(tmp_path / "m", cycles)
    expected = permutation(cycles)
    stepper = Stepper(boot_for(path, tmp_path / "cache"))
    last, said = 97, []
    stepper.step({1: [1, 2, 3]})
    for _ in range(6):
        result = stepper.step({1: [last]}, logprobs=0)[1]
        assert result.token_id == expected[last]
        assert result.logprob is not None and result.logprob > -1e-3
        last = result.token_id
        said.append(last)
    assert said == [98, 0xF0, 0x9F, 0x98, 0x80, 257]
    assert json.loads((path / "config.json").read_text())["vocab_size"] == VOCAB
