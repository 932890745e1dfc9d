"""A token's logits are the same, bit for bit, alone and in any batch, however its prompt was cut and wherever its slots lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmd.model import attention, exact
from llmd.model.batch import SampleResult
from llmd.sampling.sampler import Sampler
from tests.models import boot_for, random_llama
from tests.stepping import Stepper

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"hidden_size": 70, "intermediate_size": 37, "heads": 5, "kv_heads": 5, "layers": 3},
    "mqa": {"hidden_size": 33, "heads": 6, "kv_heads": 1, "tied": True},
    "biases": {"family": "qwen2", "intermediate_size": 1000},
    "norms": {"family": "qwen3", "hidden_size": 1030},
    "window": {"family": "mistral", "sliding_window": 50},
}
EMBEDDED = {"hidden_size": 576, "intermediate_size": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "layers": 1, "tied": True}


class Recorder(Sampler):
    """Keeps the logits it is given."""

    def sample(self, logits: torch.Tensor, wanted: Any) -> list[SampleResult]:
        self.logits = logits.clone()
        return super().sample(logits, wanted)


class Model(Stepper):
    """Steps that answer with logits."""

    def __init__(self, path: Path, cache: Path, **args: Any) -> None:
        super().__init__(boot_for(path, cache, dtype="float32", **args), requests=12, context=512)
        self.recorder = Recorder(261)
        self.runner._sampler = self.recorder

    def logits(self, new: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        self.step(new)
        return dict(zip(new, self.recorder.logits, strict=True))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["measured", "tiles"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's library allows, and the fixed tiles that serve anywhere."""
    if request.param == "tiles":
        for module in (exact, attention):
            monkeypatch.setattr(module, "row_plan", lambda *args: exact.RowPlan(exact.TILE, exact.TILE))


def prompt(length: int, seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, length)]


def assert_exact(model: Model) -> None:
    ids, rest = prompt(300, 0), prompt(12, 1)
    alone = [model.logits({1: ids})[1], *(model.logits({1: [id]})[1] for id in rest)]
    # Cut into chunks, among other prompts and decoding requests of other lengths.
    others = {row: prompt(length, row) for row, length in ((3, 1), (4, 130), (5, 17), (6, 401))}
    model.step({3: others[3], 4: others[4], 2: ids[:63]})
    model.step({2: ids[63:64], 3: [5], 5: others[5]})
    model.step({4: [7], 6: others[6], 2: ids[64:200], 3: [9]})
    found = [model.logits({3: [1], 2: ids[200:], 5: [8]})[2]]
    for index, id in enumerate(rest):
        found.append(model.logits({row: [index] for row in (6, 3, 4)[: index % 4]} | {2: [id]} | {5: [3] * (1 + index % 3)})[2])
    for index, (one, other) in enumerate(zip(alone, found, strict=True)):
        assert torch.equal(one, other), f"token {index}"
    # Its prompt once more, over KV that another step has written.
    model.req_to_token[7, :256], model.lengths[7] = model.req_to_token[1, :256], 256
    assert torch.equal(model.logits({7: ids[256:], 8: prompt(20, 8)})[7], alone[0])


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_models(tmp_path: Path, shape: str) -> None:
    assert_exact(Model(random_llama(tmp_path / "m", **SHAPES[shape]), tmp_path / "cache"))


@pytest.mark.usefixtures("plans")
def test_a_layer_of_the_embedded_shape(tmp_path: Path) -> None:
    assert_exact(Model(random_llama(tmp_path / "m", **EMBEDDED), tmp_path / "cache"))


@pytest.mark.parametrize("kv", ["bfloat16"])
def test_smaller_kv(tmp_path: Path, kv: str) -> None:
    assert_exact(Model(random_llama(tmp_path / "m"), tmp_path / "cache", kv_cache_dtype=kv))


@pytest.mark.usefixtures("plans")
def test_wide_batches(tmp_path: Path) -> None:
    model = Model(random_llama(tmp_path / "m", **EMBEDDED), tmp_path / "cache")
    ids = [prompt(40 + row, row) for row in range(12)]
    alone = [model.logits({1 + row: ids[row]})[1 + row] for row in range(12)]
    model.lengths[:] = 0
    together = model.logits({1 + row: ids[row] for row in range(12)})
    assert all(torch.equal(alone[row], together[1 + row]) for row in range(12))


@pytest.mark.parametrize("shape", [SHAPES["odd"], EMBEDDED])
def test_one_thread_gives_what_two_give(tmp_path: Path, shape: dict[str, Any]) -> None:
    model = Model(random_llama(tmp_path / "m", **shape), tmp_path / "cache")
    if model.model.module.head.rows.least == exact.TILE:
        pytest.skip("this library's order depends on its threads")
    ids = prompt(300, 0)
    two = [model.logits({1: ids})[1], model.logits({1: [3]})[1]]
    torch.set_num_threads(1)
    one = [model.logits({2: ids})[2], model.logits({2: [3]})[2]]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("count", "calls"), [(1, 1), (16, 1), (17, 2), (64, 4)])
def test_rows_go_in_tiles(count: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, seen = torch.randn(count, 24), torch.randn(24, 10), []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: seen.append(len(a)) or product(a, b, **more))
    found = exact.rowwise(x, weight, exact.RowPlan(16, 16))
    assert seen == [16] * calls
    assert torch.allclose(found, x @ weight, atol=1e-5)
