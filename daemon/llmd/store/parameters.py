"""The parameters a model of the Llama family has: their names in both formats and their shapes. Checker and loader share this list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from llmd.store.model_config import ModelConfig

#: Faults about tensors listed at most; a wrong config.json makes hundreds.
MAX_FAULTS: Final = 10

#: Tensors that may be there without being used: what follows from the configuration, and a tied head written out (GGUF's `output.weight` unties it).
HARMLESS: Final = frozenset({"rope_freqs.weight", "lm_head.weight"})
_HARMLESS_ENDS: Final = ("rotary_emb.inv_freq",)

FLOATS: Final = ("F32", "F16", "BF16")


class Parameter(Struct, frozen=True):
    """One tensor: our name (within its layer), its names in the files, its shape (row-major)."""

    name: str
    hf: str
    gguf: str
    shape: tuple[int, ...]


class StoredTensor(Protocol):
    """What both readers' tensors have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


def layer_parameters(config: ModelConfig, layer: int) -> list[Parameter]:
    """The tensors of one layer."""
    c, hf, gguf = config, f"model.layers.{layer}.", f"blk.{layer}."

    def linear(name: str, hf_name: str, gguf_name: str, out: int, into: int, bias: bool) -> list[Parameter]:
        found = [Parameter(name, f"{hf}{hf_name}.weight", f"{gguf}{gguf_name}.weight", (out, into))]
        return [*found, Parameter(f"{name}_bias", f"{hf}{hf_name}.bias", f"{gguf}{gguf_name}.bias", (out,))] if bias else found

    def norm(name: str, hf_name: str, gguf_name: str, size: int) -> Parameter:
        return Parameter(name, f"{hf}{hf_name}.weight", f"{gguf}{gguf_name}.weight", (size,))

    return [
        norm("attn_norm", "input_layernorm", "attn_norm", c.hidden_size),
        norm("mlp_norm", "post_attention_layernorm", "ffn_norm", c.hidden_size),
        *linear("q", "self_attn.q_proj", "attn_q", c.q_size, c.hidden_size, c.qkv_bias),
        *linear("k", "self_attn.k_proj", "attn_k", c.kv_size, c.hidden_size, c.qkv_bias),
        *linear("v", "self_attn.v_proj", "attn_v", c.kv_size, c.hidden_size, c.qkv_bias),
        *linear("o", "self_attn.o_proj", "attn_output", c.hidden_size, c.q_size, c.o_bias),
        *linear("gate", "mlp.gate_proj", "ffn_gate", c.intermediate_size, c.hidden_size, c.mlp_bias),
        *linear("up", "mlp.up_proj", "ffn_up", c.intermediate_size, c.hidden_size, c.mlp_bias),
        *linear("down", "mlp.down_proj", "ffn_down", c.hidden_size, c.intermediate_size, c.mlp_bias),
        *([norm("q_norm", "self_attn.q_norm", "attn_q_norm", c.head_dim), norm("k_norm", "self_attn.k_norm", "attn_k_norm", c.head_dim)] if c.qk_norm else []),
    ]


def outer_parameters(config: ModelConfig) -> list[Parameter]:
    """The tensors outside the layers. A tied head has none of its own."""
    outer = [
        Parameter("embed", "model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, config.hidden_size)),
        Parameter("final_norm", "model.norm.weight", "output_norm.weight", (config.hidden_size,)),
    ]
    head = Parameter("lm_head", "lm_head.weight", "output.weight", (config.vocab_size, config.hidden_size))
    return outer if config.tie_embeddings else [*outer, head]


def all_parameters(config: ModelConfig) -> Iterable[Parameter]:
    """Every tensor, in the order of the computation."""
    yield from outer_parameters(config)
    for layer in range(config.num_layers):
        yield from layer_parameters(config, layer)


def parameter_count(config: ModelConfig) -> int:
    """Numbers that the model's weights are."""
    return sum(math.prod(parameter.shape) for parameter in all_parameters(config))


def parameter_faults(config: ModelConfig, stored: Mapping[str, StoredTensor], source: str, *, gguf: bool) -> list[str]:
    """One line for each parameter that no file provides or that has another shape or type, and for each tensor that no parameter is.

    What nobody uses is a fault: the model would be served without layers or biases that it was trained with.
    """
    faults = []
    used: set[str] = set()
    for parameter in all_parameters(config):
        name = parameter.gguf if gguf else parameter.hf
        used.add(name)
        tensor = stored.get(name)
        if tensor is None:
            faults.append(f"{source}: no file provides the tensor {name!r}")
        elif tensor.shape != parameter.shape:
            faults.append(f"{source}: tensor {name!r} has shape {list(tensor.shape)}, the configuration says {list(parameter.shape)}")
        elif not gguf and tensor.type not in FLOATS:
            faults.append(f"{source}: tensor {name!r} has type {tensor.type}; supported: {', '.join(FLOATS)}")
    for name in stored:
        if name not in used and not (name in HARMLESS or name.endswith(_HARMLESS_ENDS)):
            faults.append(
                f"{source}: tensor {name!r} would not be used: the configuration has {config.num_layers} layers of {config.architecture}, and no place for it"
            )
    more = len(faults) - MAX_FAULTS
    return faults if more <= 0 else [*faults[:MAX_FAULTS], f"{source}: {more} more such faults"]
