"""What is packed are the reference's weights: bit for bit where nothing has to be rounded, within the format's step where it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from llmd.errors import ConfigError
from llmd.kernels import packing
from llmd.kernels.shared_library import ISAS, library
from llmd.memory.budget import native_kv_bytes
from llmd.model.loader import load_model
from llmd.model.native_loader import Matrix, NativeModel, load_native
from llmd.model.native_runner import NativeRunner
from llmd.model.pack_cache import DIRECTORY
from llmd.plan.spec import Boot
from tests.models import boot_for, gguf_of, random_llama, read_checkpoint, write_safetensors

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "sharded": {"shards": 3},
    "odd": {"hidden_size": 70, "intermediate_size": 37, "heads": 5, "kv_heads": 5},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}


def nothing(stage: str, done: int, total: int) -> None:
    pass


def unpacked(matrix: Matrix) -> npt.NDArray[np.float32]:
    return packing.unpack_rows(matrix.data, matrix.format, matrix.n, matrix.k, np.arange(matrix.n, dtype=np.int32))


def reference(boot: Boot) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, npt.NDArray[np.float32]]]:
    """(matrices, vectors) of the torch loader, in float32, by our names."""
    module = load_model(boot, nothing).module
    linears = {"lm_head": module.head}
    matrices = {"embed": module.embedding.float().numpy()}
    vectors = {"final_norm": module.final_norm.weight.float().numpy()}
    for index, layer in enumerate(module.layers):
        linears |= {f"{index}.qkv": layer.qkv, f"{index}.o": layer.o, f"{index}.gate_up": layer.gate_up, f"{index}.down": layer.down}
        norms = {"attn_norm": layer.attn_norm, "mlp_norm": layer.mlp_norm, "q_norm": layer.q_norm, "k_norm": layer.k_norm}
        vectors |= {f"{index}.{name}": norm.weight.float().numpy() for name, norm in norms.items() if norm is not None}
    for name, linear in linears.items():
        matrices[name] = linear.weight.float().numpy().T
        if linear.bias is not None:
            vectors[f"{name}_bias"] = linear.bias.float().numpy()
    return matrices, vectors


def assert_same(model: NativeModel, boot: Boot) -> None:
    matrices, vectors = reference(boot)
    assert set(model.matrices) == set(matrices)
    assert set(model.vectors) == set(vectors)
    for name, matrix in model.matrices.items():
        assert np.array_equal(unpacked(matrix), matrices[name]), name
    for name, vector in model.vectors.items():
        assert np.array_equal(vector, vectors[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_float_weights_are_the_references(tmp_path: Path, variant: str) -> None:
    boot = boot_for(random_llama(tmp_path / "m", **VARIANTS[variant]), tmp_path / "cache", dtype="float32")
    model = load_native(boot, nothing)
    assert (model.quantization, model.dtype) == ("none", "float32")
    assert_same(model, boot)
    again = load_native(boot, nothing)
    assert again.cached is not None and again.cached == model.cached
    assert_same(again, boot)


@pytest.mark.parametrize("stored", ["F16", "BF16"])
def test_16_bit_weights_stay_16_bits(tmp_path: Path, stored: str) -> None:
    boot = boot_for(random_llama(tmp_path / "m", dtype=stored), tmp_path / "cache")
    model = load_native(boot, nothing)
    assert {matrix.format for matrix in model.matrices.values()} == {stored}
    assert_same(model, boot)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conversions_round_as_torch_does(tmp_path: Path, stored: str, dtype: str) -> None:
    boot = boot_for(random_llama(tmp_path / "m", dtype=stored), tmp_path / "cache", dtype=dtype)
    matrices, _ = reference(boot)
    for name, matrix in load_native(boot, nothing).matrices.items():
        assert np.array_equal(unpacked(matrix), matrices[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q8_0"])
def test_ggufs_own_types_are_kept(tmp_path: Path, kind: str, family: str) -> None:
    boot = boot_for(gguf_of(random_llama(tmp_path / "m", family=family), tmp_path / "m.gguf", kind), tmp_path / "cache")
    model = load_native(boot, nothing)
    assert {matrix.format for matrix in model.matrices.values()} == {kind}
    assert model.quantization == ("none" if kind == "F32" else kind.lower())
    assert_same(model, boot)


def test_a_quantized_gguf_is_dequantized_where_float32_is_written_out(tmp_path: Path) -> None:
    boot = boot_for(gguf_of(random_llama(tmp_path / "m"), tmp_path / "m.gguf", "Q4_1"), tmp_path / "cache", dtype="float32")
    model = load_native(boot, nothing)
    assert {matrix.format for matrix in model.matrices.values()} == {"F32"}
    assert_same(model, boot)


@pytest.mark.parametrize("kind", ["Q5_1", "Q5_0"])
def test_other_types_lose_no_more_than_8_bits_do(tmp_path: Path, kind: str) -> None:
    boot = boot_for(gguf_of(random_llama(tmp_path / "m"), tmp_path / "m.gguf", kind), tmp_path / "cache")
    matrices, _ = reference(boot)
    for name, matrix in load_native(boot, nothing).matrices.items():
        assert matrix.format == "Q8_0"
        assert_within(unpacked(matrix), matrices[name], 254)


@pytest.mark.parametrize(("quantization", "steps"), [("int8", 254), ("int4", 15)])
@pytest.mark.parametrize("of", ["safetensors", "gguf"])
def test_quantizing_at_load(tmp_path: Path, of: str, quantization: str, steps: int) -> None:
    checkpoint = random_llama(tmp_path / "m")
    path = checkpoint if of == "safetensors" else gguf_of(checkpoint, tmp_path / "m.gguf", "Q8_0")
    model = load_native(boot_for(path, tmp_path / "cache", quantization=quantization), nothing)
    assert model.quantization == ("q8_0" if quantization == "int8" else "q4_1")
    matrices, _ = reference(boot_for(path, tmp_path / "cache"))
    for name, matrix in model.matrices.items():
        assert_within(unpacked(matrix), matrices[name], steps if name not in ("embed", "lm_head") else 254)


def assert_within(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32], steps: int) -> None:
    """The error of each group of 32, as a root mean square, is below half a step of its range (4 bits have a minimum, 8 bits are around 0)."""
    groups = wanted.reshape(-1, 32)
    span = groups.max(1) - groups.min(1) if steps == 15 else 2 * np.abs(groups).max(1)
    assert (np.sqrt(((found.reshape(-1, 32) - groups) ** 2).mean(1)) <= 0.5 * span / steps).all()


def test_progress_and_one_copy_of_a_tied_head(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    boot = boot_for(random_llama(tmp_path / "m", tied=True), tmp_path / "cache")
    model = load_native(boot, lambda *step: seen.append(step))
    assert model.matrices["lm_head"] is model.matrices["embed"]
    assert [stage for stage, *_ in seen][:1] == ["packing weights"] and seen[-1] == ("weights", model.weights_bytes, model.weights_bytes)
    seen.clear()
    load_native(boot, lambda *step: seen.append(step))
    assert [stage for stage, *_ in seen] == ["weights"], "nothing is packed twice"


def test_weights_that_changed_are_packed_again(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    boot = boot_for(path, tmp_path / "cache")
    load_native(boot, nothing)
    _, tensors = read_checkpoint(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write_safetensors(path / "model.safetensors", tensors)
    assert_same(load_native(boot, nothing), boot)
    assert len([*(tmp_path / "cache" / DIRECTORY).glob("*.pack")]) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_numbers_are_named_when_asked_for(tmp_path: Path, value: float) -> None:
    path = random_llama(tmp_path / "m")
    _, tensors = read_checkpoint(path)
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    write_safetensors(path / "model.safetensors", tensors)
    load_native(boot_for(path, tmp_path / "cache"), nothing)
    with pytest.raises(ConfigError, match=rf"'{name}' holds NaN or Inf"):  # a pack that is there already changes nothing
        load_native(boot_for(path, tmp_path / "cache", verify_weights=True), nothing)


@pytest.mark.parametrize("args", [{}, {"dtype": "float32"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_the_checking_child_knows_the_size(tmp_path: Path, args: dict[str, str]) -> None:
    boot = boot_for(random_llama(tmp_path / "m", attention_bias=True), tmp_path / "cache", **args)
    assert boot.files.kernels in ISAS
    assert boot.files.native_bytes == load_native(boot, nothing).weights_bytes


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_the_budget_knows_the_caches_size(tmp_path: Path, kv: str, head_dim: int) -> None:
    boot = boot_for(random_llama(tmp_path / "m", head_dim=head_dim), tmp_path / "cache", dtype="float32", kv_cache_dtype=kv)
    runner = NativeRunner(load_native(boot, nothing), 64, 16, kv, 1, boot.files.tokenizer_size)
    assert native_kv_bytes(boot.files.kv_vectors_per_token, boot.files.kv_values_per_token, kv) * 64 == runner.program.cache_bytes(64)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_cache_takes_memory_as_it_is_used_or_at_once(tmp_path: Path, threads: int) -> None:
    boot = boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32", kv_cache_dtype="float32")
    model, slots, process = load_native(boot, nothing), 1 << 17, psutil.Process()
    taken, kept = [], []
    told: list[int] = []
    for preallocate in (None, told.append):
        before = process.memory_info().rss
        kept.append(NativeRunner(model, slots, 16, "float32", threads, boot.files.tokenizer_size, preallocate=preallocate))
        taken.append(process.memory_info().rss - before)
    size = kept[0].program.cache_bytes(slots)
    assert size >= 2**26 and taken[0] < size / 4 and taken[1] > size * 0.9
    assert not kept[1].program.cache.any()
    assert told[-1] == size and told == sorted(told)


@pytest.mark.parametrize("begin", [1 << 15, (1 << 15) + 3])
def test_a_part_of_the_cache_is_taken_and_no_tile_before_it_is_touched(tmp_path: Path, begin: int) -> None:
    boot = boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32", kv_cache_dtype="float32")
    slots, end, process = 1 << 17, 1 << 16, psutil.Process()
    runner = NativeRunner(load_native(boot, nothing), slots, 16, "float32", 1, boot.files.tokenizer_size)
    used = runner.program.cache_bytes(begin)
    runner.program.cache[:used] = 1
    before = process.memory_info().rss
    runner.take(begin, end)
    taken, size = process.memory_info().rss - before, runner.program.cache_bytes(end) - used
    assert size >= 2**23 and size * 0.8 < taken < size * 1.2 + 2**22
    assert runner.program.cache[:used].all() and not runner.program.cache[used:].any()
