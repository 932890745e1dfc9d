"""What config.json may say: the Llama family in its variants, and a clear refusal of everything else."""

from __future__ import annotations

from typing import Any

import pytest

from llmd.errors import ConfigError
from llmd.store.model_config import from_hf

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_defaults_are_those_of_the_family() -> None:
    config = from_hf(BASE, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert not (config.tie_embeddings or config.qkv_bias or config.qk_norm)
    assert from_hf({**BASE, "model_type": "qwen2"}, "c").qkv_bias
    assert not from_hf({**BASE, "model_type": "qwen2"}, "c").o_bias
    assert from_hf({**BASE, "model_type": "qwen3"}, "c").qk_norm
    assert from_hf({**BASE, "attention_bias": True}, "c").o_bias


def test_rope_is_read_from_both_forms() -> None:
    old = from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "c")
    new = from_hf({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}, "c")
    assert old == new
    assert (old.rope_theta, old.rope_scaling.kind, old.rope_scaling.factor) == (5e5, "linear", 2.0)


def test_sliding_windows() -> None:
    assert from_hf({**BASE, "model_type": "mistral", "sliding_window": 8}, "c").windows == (8, 8, 8)
    assert from_hf({**BASE, "model_type": "mistral", "sliding_window": None}, "c").windows == ()
    qwen = {**BASE, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
    assert from_hf(qwen, "c").windows == ()
    assert from_hf({**qwen, "use_sliding_window": True}, "c").windows == (0, 0, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama"),
        ({"model_type": None}, "supported: llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "number of layers is 0"),
        ({"num_attention_heads": 0, "head_dim": 16}, "number of heads is 0"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 15}, "odd"),
        ({"vocab_size": 2**40}, "vocabulary size"),
        ({"rms_norm_eps": -1.0}, "rms eps"),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "layer_types": ["x"]}, "layer_types"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        from_hf({**BASE, **change}, "path/config.json")
    assert "path/config.json" in caught.value.message
