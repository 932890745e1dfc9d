"""`ModelConfig`: what the Llama family's models differ in, read from GGUF metadata or from a Hugging Face config.json.

Frozen, plain numbers, no torch. Whatever this version cannot compute exactly is refused with a `ConfigError` that says what is supported.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from llmd.errors import ConfigError
from llmd.store.gguf import GgufFile

T = TypeVar("T")

SUPPORTED: Final = "llama, mistral, qwen2, qwen3 (and models that call themselves one of these, such as SmolLM2)"
#: model_type / general.architecture -> (bias on q, k, v by default, norm on q and k)
_FAMILY: Final = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}

#: No real model is larger in any of these; a damaged file is.
MAX_SIZE: Final = 2**20
MAX_LAYERS: Final = 1024
MAX_CONTEXT: Final = 2**24


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched. `kind`: none, linear, llama3, yarn, or tensor (factors in the file, GGUF's rope_freqs.weight)."""

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Shapes and constants of one model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for none; empty: none anywhere."""
    permuted_qk: bool = False
    """Rows of q and k are in the order of GGUF's llama (pairs side by side)."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's K and V are, in all layers."""
        return self.num_layers * 2 * self.kv_size

    @property
    def kv_vectors_per_token(self) -> int:
        """Heads of one token's K and V, in all layers."""
        return self.num_layers * 2 * self.num_kv_heads

    def window(self, layer: int) -> int:
        """Tokens that layer's attention looks back, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def check(self, source: str) -> ModelConfig:
        """Return self; raise ConfigError where the numbers cannot be a model's."""
        faults = [
            f"{source}: {name} is {value}"
            for name, value, limit in (
                ("vocabulary size", self.vocab_size, 2**24), ("hidden size", self.hidden_size, MAX_SIZE),
                ("intermediate size", self.intermediate_size, MAX_SIZE), ("number of layers", self.num_layers, MAX_LAYERS),
                ("number of heads", self.num_heads, MAX_SIZE), ("number of KV heads", self.num_kv_heads, MAX_SIZE),
                ("head size", self.head_dim, MAX_SIZE), ("context length", self.context_length, MAX_CONTEXT),
            )
            if not 1 <= value <= limit
        ]  # fmt: skip
        if not faults and self.num_heads % self.num_kv_heads:
            faults.append(f"{source}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            faults.append(f"{source}: the head size {self.head_dim} is odd")
        if not 0 <= self.rms_eps < 1 or not 0 < self.rope_theta < 1e15 or not 0 < self.rope_scaling.factor < 1e6:
            faults.append(f"{source}: rms eps {self.rms_eps}, rope theta {self.rope_theta}, rope factor {self.rope_scaling.factor} cannot be right")
        if faults:
            raise ConfigError(faults)
        return self


def from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration of a GGUF file. Raises ConfigError."""
    source, meta = str(file.path), file.metadata
    arch = meta.get("general.architecture")
    if arch not in _FAMILY or meta.get(f"{arch}.expert_count", 0):
        experts = " with experts" if arch in _FAMILY else ""
        raise ConfigError(f"{source}: architecture {arch!r}{experts} is not supported; supported: {SUPPORTED}")
    get = _Typed(source, meta, f"{arch}.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{source}: the tensor token_embd.weight is missing")
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // max(heads, 1))
    if get.integer("rope.dimension_count", head_dim) != head_dim or get.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{source}: rotary or value dimensions other than the head size {head_dim} are not supported")
    layers = get.integer("block_count")
    window = get.integer("attention.sliding_window", 0)
    return ModelConfig(
        architecture=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=get.integer("context_length"),
        rms_eps=get.number("attention.layer_norm_rms_epsilon"),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(get, "rope_freqs.weight" in file.tensors),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=_FAMILY[arch][1],
        windows=(window,) * layers if window and 0 < layers <= MAX_LAYERS else (),
        permuted_qk=arch == "llama",
    ).check(source)


def _gguf_scaling(get: _Typed, has_tensor: bool) -> RopeScaling:
    if has_tensor:
        return RopeScaling(kind="tensor")
    kind = get.text("rope.scaling.type", "none")
    factor = get.number("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{get.source}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3")
    original = get.integer("rope.scaling.original_context_length", 0)
    return RopeScaling(kind=kind, factor=factor, original_context=original or int(get.integer("context_length") / factor))


def from_hf(config: dict[str, Any], source: str) -> ModelConfig:
    """The configuration of a Hugging Face config.json. Raises ConfigError."""
    kind = config.get("model_type")
    if kind not in _FAMILY:
        raise ConfigError(f"{source}: model_type {kind!r} is not supported; supported: {SUPPORTED}")
    get = _Typed(source, config, "")
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantization_config: quantized safetensors are not supported; take the unquantized model or a GGUF file")
    if (act := get.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"{source}: hidden_act {act!r} is not supported; supported: silu")
    hidden, heads, layers = get.integer("hidden_size"), get.integer("num_attention_heads"), get.integer("num_hidden_layers")
    attention_bias = get.flag("attention_bias", False)
    theta, scaling = _hf_rope(get)
    return ModelConfig(
        architecture=str(kind),
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get.integer("num_key_value_heads", heads),
        head_dim=get.integer("head_dim", hidden // max(heads, 1)),
        context_length=get.integer("max_position_embeddings"),
        rms_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=get.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or _FAMILY[kind][0],
        o_bias=attention_bias and kind != "qwen2",
        mlp_bias=get.flag("mlp_bias", False),
        qk_norm=_FAMILY[kind][1],
        windows=_hf_windows(get, str(kind), layers),
    ).check(source)


def _hf_rope(get: _Typed) -> tuple[float, RopeScaling]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    raw = get.values.get("rope_parameters") or get.values.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{get.source}: rope_scaling is not an object")
    rope = _Typed(get.source, raw, "")
    theta = rope.number("rope_theta", get.number("rope_theta", 10000.0))
    if get.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{get.source}: a partial_rotary_factor other than 1 is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn") or raw.get("mscale") or raw.get("mscale_all_dim"):
        raise ConfigError(f"{get.source}: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    context = get.integer("max_position_embeddings")
    return theta, RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        original_context=rope.integer("original_max_position_embeddings", get.integer("original_max_position_embeddings", context)),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", 0.0) or None,
        truncate=rope.flag("truncate", True),
    )


def _hf_windows(get: _Typed, kind: str, layers: int) -> tuple[int, ...]:
    window = get.integer("sliding_window", 0)
    if not window or kind == "llama" or not 0 < layers <= MAX_LAYERS:
        return ()
    if kind.startswith("qwen") and not get.flag("use_sliding_window", False):
        return ()
    types = get.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"{get.source}: layer_types does not name {layers} layers")
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    full = get.integer("max_window_layers", 28) if kind.startswith("qwen") else 0
    return tuple(window if layer >= full else 0 for layer in range(layers))


class _Typed:
    """Typed look-ups in untrusted JSON or metadata. A null counts as absent."""

    def __init__(self, source: str, values: dict[str, Any], prefix: str) -> None:
        self.source, self.values, self.prefix = source, values, prefix

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        value = self.values.get(self.prefix + key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {self.prefix}{key} is missing")
            return default
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.source}: {self.prefix}{key}: {error}") from None

    def integer(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._get(key, float, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, bool, default)
