"""Which format each matrix is packed in, from what the files hold and what the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from llmd.config.server_args import ModelArgs
from llmd.store.gguf import GgufFile
from llmd.store.model_config import ModelConfig, from_gguf
from llmd.store.native_plan import NativePlan, main_format, make_plan, paired_heads
from llmd.store.parameters import StoredTensor, all_parameters
from tests.models import gguf_of, random_llama


class Stored:
    """A tensor's header."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        self.shape, self.type, self.nbytes = shape, kind, 0


def config(**more: int | bool) -> ModelConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return ModelConfig(architecture="llama", vocab_size=264, context_length=64, rms_eps=1e-5, rope_theta=1e4, **{"tie_embeddings": True, **sizes, **more})  # type: ignore[arg-type]


def plan_of(kinds: Mapping[str, str], default: str = "Q4_1", made: ModelConfig | None = None, **args: str) -> NativePlan:
    """Of a GGUF whose matrices are `default` but those whose name contains a key of `kinds`."""
    made = made or config()
    stored: dict[str, StoredTensor] = {}
    for parameter in all_parameters(made):
        kind = next((kind for part, kind in kinds.items() if part in parameter.gguf), default)
        stored[parameter.gguf] = Stored(parameter.shape, "F32" if len(parameter.shape) == 1 else kind)
    return make_plan(made, stored, ModelArgs(**args), gguf=True)  # type: ignore[arg-type]


def formats(plan: NativePlan) -> dict[str, str]:
    """By the name within the layer, which must be the same in all layers."""
    found: dict[str, str] = {}
    for matrix in plan.matrices:
        name = matrix.name.rpartition(".")[2]
        assert found.setdefault(name, matrix.format) == matrix.format
    return found


ALL = ("embed", "qkv", "o", "gate_up", "down")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"embed": "Q8_0", "qkv": "Q4_1", "o": "Q4_1", "gate_up": "Q4_1", "down": "Q4_1"}),
        ({"dtype": "bfloat16"}, {"embed": "Q8_0", "qkv": "Q4_1", "o": "Q4_1", "gate_up": "Q4_1", "down": "Q4_1"}),
        ({"dtype": "float32"}, dict.fromkeys(ALL, "F32")),
        ({"dtype": "float32", "quantization": "int8"}, dict.fromkeys(ALL, "Q8_0")),
        ({"quantization": "none"}, dict.fromkeys(ALL, "F32")),
        ({"quantization": "none", "dtype": "bfloat16"}, dict.fromkeys(ALL, "BF16")),
        ({"quantization": "none", "dtype": "float16"}, dict.fromkeys(ALL, "F16")),
        ({"quantization": "int8"}, dict.fromkeys(ALL, "Q8_0")),
        ({"quantization": "int4"}, {"embed": "Q8_0", "qkv": "Q4_1", "o": "Q4_1", "gate_up": "Q4_1", "down": "Q4_1"}),
    ],
)
def test_a_gguf_as_the_embedded_one(args: dict[str, str], expected: dict[str, str]) -> None:
    assert formats(plan_of({"token_embd": "Q8_0"}, **args)) == expected


@pytest.mark.parametrize(
    ("args", "shown"),
    [({}, "Q4_1"), ({"dtype": "float32"}, "float32"), ({"quantization": "none", "dtype": "float16"}, "float16"), ({"quantization": "int8"}, "Q8_0")],
)
def test_what_most_weights_are_kept_as(args: dict[str, str], shown: str) -> None:
    assert main_format(plan_of({"token_embd": "Q8_0"}, **args)) == shown


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "Q6_K", "IQ4_NL"])
def test_types_without_kernels_become_8_bits(kind: str) -> None:
    assert set(formats(plan_of({}, kind)).values()) == {"Q8_0"}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"attn_v": "Q8_0"}, "Q8_0"),  # q and k lose nothing worth speaking of
        ({"attn_v": "Q6_K"}, "Q8_0"),
        ({"attn_v": "F16"}, "F32"),  # and v nothing at all
        ({"attn_": "F16"}, "F16"),
        ({"attn_": "Q4_0"}, "Q4_0"),
    ],
)
def test_matrices_of_one_input_share_a_format(kinds: dict[str, str], expected: str) -> None:
    assert formats(plan_of(kinds))["qkv"] == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_weights_stay_what_they_are(kind: str) -> None:
    assert set(formats(plan_of({}, kind)).values()) == {kind}
    assert set(formats(plan_of({}, kind, dtype="bfloat16")).values()) == {"BF16"}
    assert set(formats(plan_of({}, kind, dtype="float32")).values()) == {"F32"}


def test_what_has_no_whole_groups_is_not_quantized() -> None:
    found = formats(plan_of({}, "F32", config(hidden_size=70, intermediate_size=96), quantization="int8"))
    assert found == {"embed": "F32", "qkv": "F32", "o": "Q8_0", "gate_up": "F32", "down": "Q8_0"}


def test_a_tied_head_is_packed_once() -> None:
    assert [matrix.name for matrix in plan_of({}).matrices].count("lm_head") == 0
    assert "lm_head" in formats(plan_of({}, made=config(tie_embeddings=False)))


def test_biases_and_norms_are_vectors() -> None:
    plan = plan_of({}, made=config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True))
    sizes = {vector.name: vector.n for vector in plan.vectors}
    assert sizes == {"final_norm": 64} | {
        f"{layer}.{name}": n
        for layer in range(2)
        for name, n in {
            "attn_norm": 64, "mlp_norm": 64, "q_norm": 16, "k_norm": 16, "qkv_bias": 128, "o_bias": 64, "gate_up_bias": 192, "down_bias": 64,
        }.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("permuted", "heads"),
    [(True, {"q_norm": 1, "k_norm": 1}), (False, {"q": 4, "k": 2, "q_bias": 4, "k_bias": 2, "q_norm": 1, "k_norm": 1})],
)
def test_rows_that_lie_in_halves_are_paired(permuted: bool, heads: dict[str, int]) -> None:
    made = config(permuted_qk=permuted)
    names = ("q", "q_bias", "q_norm", "k", "k_bias", "k_norm", "v", "v_bias", "o", "embed", "attn_norm")
    assert {name: count for name in names if (count := paired_heads(made, name))} == heads


def test_a_real_file(tmp_path: Path) -> None:
    file = GgufFile(gguf_of(random_llama(tmp_path / "m", tied=True), tmp_path / "m.gguf", "Q4_0"))
    plan = make_plan(from_gguf(file), file.tensors, ModelArgs(), gguf=True)
    assert set(formats(plan).values()) == {"Q4_0"}
    assert [(matrix.n, matrix.k) for matrix in (plan.matrices[0], plan.matrices[-1])] == [(128, 64), (264, 64)], "as a step uses them"
