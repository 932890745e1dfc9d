"""Loading: every parameter is provided, or the fault names it; types follow the configuration; faults can be provoked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmd import failpoints
from llmd.errors import ConfigError
from llmd.failpoints import FailpointError
from llmd.model.loader import load_model
from tests.models import boot_for, gguf_of, random_llama, read_checkpoint, write_checkpoint, write_safetensors
from tests.stepping import Stepper


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def nothing(stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "dtype", "kv_dtype"),
    [
        ({}, torch.float32, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32, torch.float32),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"kv_cache_dtype": "float32"}, torch.float32, torch.float32),
    ],
)
def test_types_follow_the_configuration(tmp_path: Path, args: dict[str, str], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    model = load_model(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", **args), nothing)
    assert (model.dtype, model.kv_dtype, model.device.type, model.quantization) == (dtype, kv_dtype, "cpu", "none")
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * kv_dtype.itemsize
    assert model.module.layers[0].qkv.weight.dtype == dtype


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    boot = boot_for(random_llama(tmp_path / "m"), tmp_path / "cache")
    load_model(boot, lambda *step: seen.append(step))
    done = [bytes_ for _, bytes_, _ in seen]
    assert done == sorted(set(done)) and {total for *_, total in seen} == {done[-1]} == {boot.files.weights_bytes}


def test_what_needs_no_change_stays_on_the_mapping(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    model = load_model(boot_for(path, tmp_path / "cache"), nothing)
    address = model.module.embedding.data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    holders = [line[-1] for line in maps if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)]
    assert holders == [str(path / "model.safetensors")]


def test_weights_that_changed_after_the_check_are_refused(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    boot = boot_for(path, tmp_path / "cache")
    config, tensors = read_checkpoint(path)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    write_checkpoint(path, config, tensors)
    with pytest.raises(ConfigError, match=r"no file provides the tensor 'model\.layers\.1\.self_attn\.o_proj\.weight'"):
        load_model(boot, nothing)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_numbers_are_named_when_asked_for(tmp_path: Path, value: float) -> None:
    path = random_llama(tmp_path / "m")
    _, tensors = read_checkpoint(path)
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=rf"'{name}' holds NaN or Inf"):
        load_model(boot_for(path, tmp_path / "cache", verify_weights=True), nothing)
    gguf = gguf_of(path, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"'blk\.1\.ffn_gate\.weight' holds NaN or Inf"):
        load_model(boot_for(gguf, tmp_path / "cache", verify_weights=True), nothing)
    stepper = Stepper(boot_for(path, tmp_path / "cache"))
    assert not stepper.step({1: [1, 2, 3]})[1].finite


def test_failpoint_of_a_shard(tmp_path: Path) -> None:
    boot = boot_for(random_llama(tmp_path / "m", shards=2), tmp_path / "cache")
    failpoints.arm("loader.shard(00002-of)=raise")
    with pytest.raises(FailpointError):
        load_model(boot, nothing)
    failpoints.arm("loader.shard(00003-of)=raise")
    load_model(boot, nothing)


@pytest.mark.parametrize(("args", "text"), [({"quantization": "int8"}, "int8"), ({"kv_cache_dtype": "int8"}, "int8")])
def test_what_is_not_there_yet_is_refused(tmp_path: Path, args: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_model(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", **args), nothing)


def test_cuda_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA GPU is here")
    with pytest.raises(ConfigError, match=r"model\.device: cuda"):
        load_model(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", device="cuda"), nothing)


@pytest.mark.cuda
def test_cuda_gives_the_cpus_tokens(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m")
    ids = list(range(60))
    cpu = Stepper(boot_for(path, tmp_path / "cache", dtype="float32")).prompt_logprobs(1, ids)
    gpu = Stepper(boot_for(path, tmp_path / "cache", dtype="float32", device="cuda")).prompt_logprobs(1, ids)
    assert gpu == pytest.approx(cpu, abs=1e-3)
