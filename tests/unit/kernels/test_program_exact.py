"""A token's logits are the same, bit for bit, alone and in any batch, however its prompt was cut, over KV that is there already, by one thread and by two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.kernels.program import KV_TYPES, Program
from llmd.model.native_loader import NativeModel
from tests.models import boot_for, gguf_of, random_llama
from tests.programs import ProgramStepper, load
from tests.unit.kernels.native import isas, using
from tests.unit.model.test_forward import tokens

pytestmark = pytest.mark.skipif(not isas(), reason="the native kernels are not built")

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"hidden_size": 70, "intermediate_size": 37, "heads": 5, "kv_heads": 5, "layers": 3},
    "mqa": {"hidden_size": 33, "heads": 7, "kv_heads": 1, "tied": True},
    "norms": {"family": "qwen3", "hidden_size": 200, "head_dim": 24},
    "window": {"family": "mistral", "sliding_window": 50},
    "long window": {"family": "mistral", "sliding_window": 200, "heads": 6, "head_dim": 80},
}
#: The embedded model's heads, a third of them.
HEADS_OF_64: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "heads": 3, "kv_heads": 1, "head_dim": 64, "layers": 1, "tied": True}


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    with using(request.param):
        yield request.param


class Model(ProgramStepper):
    """Steps that answer with the log-probabilities of all ids."""

    def __init__(self, model: NativeModel, **args: Any) -> None:
        super().__init__(model, requests=12, context=512, **args)

    def table(self, new: dict[int, list[int]]) -> dict[int, Any]:
        return {row: (result.logprob, result.top) for row, result in self.step(new, logprobs=261).items()}


def assert_exact(alone: Model, other: Model) -> None:
    """What `alone` computes alone, token for token, is what `other` computes otherwise."""
    ids, rest = tokens(300), tokens(12, 1)
    expected = [alone.table({1: ids})[1], *(alone.table({1: [id]})[1] for id in rest)]
    others = {row: tokens(length, row) for row, length in ((3, 1), (4, 130), (5, 17), (6, 401))}
    other.step({3: others[3], 4: others[4], 2: ids[:63]})
    other.step({2: ids[63:64], 3: [5], 5: others[5]})
    other.step({4: [7], 6: others[6], 2: ids[64:200], 3: [9]})
    found = [other.table({3: [1], 2: ids[200:], 5: [8]})[2]]
    for index, id in enumerate(rest):
        found.append(other.table({row: [index] for row in (6, 3, 4)[: index % 4]} | {2: [id]} | {5: [3] * (1 + index % 3)})[2])
    for index, (one, two) in enumerate(zip(expected, found, strict=True)):
        assert one == two, f"token {index}"
    # Its prompt once more, over KV that another step has written.
    other.req_to_token[7, :256], other.lengths[7] = other.req_to_token[2, :256], 256
    assert other.table({7: ids[256:], 8: tokens(20, 8)})[7] == expected[0]


@pytest.mark.parametrize(("shape", "kv_type"), [*zip(SHAPES, [*KV_TYPES] * 2, strict=True), *(("long window", kv_type) for kv_type in ("float32", "bfloat16"))])
def test_tiny_models(tmp_path: Path, isa: str, shape: str, kv_type: str) -> None:
    model = load(boot_for(random_llama(tmp_path / "m", **SHAPES[shape]), tmp_path / "cache", dtype="float32"))
    assert_exact(Model(model, kv_type=kv_type), Model(model, kv_type=kv_type, threads=2, shape={"max_rows": 100, "max_logits": 3}))


@pytest.mark.parametrize("types", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
def test_quantized_weights_and_scattered_slots(tmp_path: Path, isa: str, types: str) -> None:
    path = gguf_of(random_llama(tmp_path / "m", **HEADS_OF_64), tmp_path / "m.gguf", types)
    model = load(boot_for(path, tmp_path / "cache"))
    assert_exact(Model(model, kv_type="bfloat16", threads=2), Model(model, kv_type="bfloat16", page_size=1))


@pytest.mark.parametrize("types", ["F32", "F16", "BF16", "Q4_1"])
def test_gate_and_up_in_one_give_the_same_bits_as_one_after_the_other(tmp_path: Path, isa: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(boot_for(gguf_of(random_llama(tmp_path / "m", **HEADS_OF_64), tmp_path / "m.gguf", types), tmp_path / "cache"))
    together = Model(model, threads=2)

    def gated(self: Program, x: int, matrix: int, middle: int, out: int) -> int:
        return self.swiglu(self.linear(x, matrix, middle), out)

    monkeypatch.setattr(Program, "gated", gated)
    apart = Model(model, threads=2)
    for length in (1, 3, 8, 16, 40, 256):
        assert together.table({1: tokens(length)}) == apart.table({1: tokens(length)})


@pytest.mark.parametrize("streams", [12, 64])
def test_wide_batches(tmp_path: Path, isa: str, streams: int) -> None:
    model = load(boot_for(gguf_of(random_llama(tmp_path / "m", **HEADS_OF_64), tmp_path / "m.gguf", "Q4_1"), tmp_path / "cache"))
    ids = [tokens(10 + 13 * row % 190, row) for row in range(streams)]
    alone, together = (ProgramStepper(model, kv_type="bfloat16", threads=threads, requests=64, context=256) for threads in (1, 2))
    together.step(dict(enumerate(ids, 1)))
    found = together.step({row: [7] for row in range(1, streams + 1)}, logprobs=20)
    for row in {1, 2, streams // 2, streams}:
        alone.step({row: ids[row - 1]})
        assert alone.step({row: [7]}, logprobs=20)[row] == found[row]
