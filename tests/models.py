"""Makers of tiny checkpoints for tests: real files of the Llama family, a few hundred kilobytes, made in milliseconds. No torch.

`permutation_llama`: the next token is a permutation of the last one, so any output can be scripted. `random_llama`: seeded random weights,
for everything where the context must matter. `gguf_of` writes a checkpoint's GGUF. All share a byte tokenizer: id = byte, then SPECIALS.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmd.config import ServerArgs
from llmd.config.server_args import ModelArgs
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot
from llmd.store.dummy import byte_tokenizer
from llmd.store.model_files import model_files

Array = npt.NDArray[Any]

SPECIALS = {"<s>": 256, "</s>": 257, "<|user|>": 258, "<|assistant|>": 259, "<|end|>": 260}
BOS, EOS, ASSISTANT = SPECIALS["<s>"], SPECIALS["</s>"], SPECIALS["<|assistant|>"]
#: Three rows more than the tokenizer knows: ids that must never be sampled.
VOCAB = 264
CHAT_TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
#: A chat begins with a space and goes through printable ASCII, for ever.
PRINTABLE = ((*range(32, 127), ASSISTANT),)


def permutation(cycles: Iterable[Sequence[int]]) -> Array:
    """next[id]: each cycle's ids follow one another and the last one its first; every other id follows itself."""
    following = np.arange(VOCAB)
    for cycle in cycles:
        assert len(set(cycle)) == len(cycle), "the ids of a cycle are distinct"
        for id, successor in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            following[id] = successor
    assert len(set(following.tolist())) == VOCAB, "cycles do not overlap"
    return following


def permutation_llama(path: Path, cycles: Iterable[Sequence[int]] = PRINTABLE, *, context: int = 2048, chat: bool = True) -> Path:
    """A checkpoint directory whose greedy next token is `permutation(cycles)[last token]`, with probability 0.9999."""
    config = _config("llama", hidden=VOCAB, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=16, context=context)
    tensors = _random_tensors(config, np.random.default_rng(0))
    head = np.zeros((VOCAB, VOCAB), dtype=np.float32)
    head[permutation(cycles), np.arange(VOCAB)] = 1.0
    tensors["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    tensors["lm_head.weight"] = head
    tensors["model.norm.weight"] = np.ones(VOCAB, dtype=np.float32)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] *= 0.0
    return write_checkpoint(path, config, tensors, chat=chat)


def random_llama(
    path: Path, *, family: str = "llama", seed: int = 0, layers: int = 2, heads: int = 4, kv_heads: int = 2, tied: bool = False, shards: int = 1,
    dtype: str = "F32", context: int = 2048, chat: bool = True, **config: Any,
) -> Path:  # fmt: skip
    """A checkpoint directory with random weights. `family`: llama, mistral, qwen2 (biases), qwen3 (q and k norm). `config` goes into config.json."""
    made = _config(family, hidden=64, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=16, intermediate=96, context=context)
    made |= {"tie_word_embeddings": tied, **config}
    return write_checkpoint(path, made, _random_tensors(made, np.random.default_rng(seed)), shards=shards, dtype=dtype, chat=chat)


def write_checkpoint(path: Path, config: dict[str, Any], tensors: Mapping[str, Array], *, shards: int = 1, dtype: str = "F32", chat: bool = True) -> Path:
    """Write a checkpoint directory as transformers would, byte tokenizer included."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(SPECIALS)))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    if chat:
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors, dtype)
        return path
    names = list(tensors)
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        write_safetensors(path / file, {name: tensors[name] for name in part}, dtype)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: str = "F32") -> None:
    """Write float tensors as F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = _as_type(tensor, dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def boot_for(path: Path, cache_dir: Path, **model: Any) -> Boot:
    """What a worker would be told for the model at `path`, checked by the store; `model` overrides keys of the section `model`."""
    args = ServerArgs(model=ModelArgs(path=str(path), **{"device": "cpu", "threads": 1, **model}))
    return Boot(
        start_id="test", started_at=0.0, args=args, ports=PortArgs(str(cache_dir / "run")), files=model_files(args.model, cache_dir), processes=(),
        http_url="", state_dir=str(cache_dir), cache_dir=str(cache_dir), log_dir=str(cache_dir),
    )  # fmt: skip


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(config, tensors) of a one-file F32 checkpoint."""
    from safetensors.numpy import load_file

    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def gguf_of(checkpoint: Path, path: Path, types: str = "F32") -> Path:
    """The GGUF of a one-file F32 checkpoint, as llama.cpp's converter names and permutes it; linears in `types`."""
    import gguf

    config, tensors = read_checkpoint(checkpoint)
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    pieces = [character for character, _ in sorted(byte_tokenizer({})["model"]["vocab"].items(), key=lambda item: item[1])]
    specials = [*SPECIALS, "<unused1>", "<unused2>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*pieces, *specials, "hi"])
    writer.add_token_types([1] * 256 + [3] * len(specials) + [1])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)
    kind = gguf.GGMLQuantizationType[types]
    for name, tensor in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        tensor = np.ascontiguousarray(tensor, dtype=np.float32)
        if tensor.ndim == 2 and types != "F32" and tensor.shape[1] % 32 == 0:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def _config(family: str, *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, context: int) -> dict[str, Any]:
    architecture = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    return {
        "architectures": [architecture], "model_type": family, "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_act": "silu",
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip


def _random_tensors(config: Mapping[str, Any], random: np.random.Generator) -> dict[str, Array]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    tensors: dict[str, Array] = {}

    def linear(name: str, out: int, into: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = (random.standard_normal((out, into)) * 1.5 / np.sqrt(into)).astype(np.float32)
        if bias:
            tensors[f"{name}.bias"] = (random.standard_normal(out) * 0.5).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (1 + 0.2 * random.standard_normal(size)).astype(np.float32)

    tensors["model.embed_tokens.weight"] = random.standard_normal((VOCAB, hidden)).astype(np.float32)
    attention_bias = bool(config["attention_bias"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm", hidden)
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            linear(f"{at}.self_attn.{name}_proj", size, hidden, attention_bias or config["model_type"] == "qwen2")
        if config["model_type"] == "qwen3":
            norm(f"{at}.self_attn.q_norm", config["head_dim"])
            norm(f"{at}.self_attn.k_norm", config["head_dim"])
        linear(f"{at}.self_attn.o_proj", hidden, q, attention_bias)
        norm(f"{at}.post_attention_layernorm", hidden)
        for name, out, into in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{at}.mlp.{name}_proj", out, into, bool(config.get("mlp_bias")))
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", VOCAB, hidden)
    return tensors


def _as_type(tensor: Array, dtype: str) -> bytes:
    floats = np.ascontiguousarray(tensor, dtype=np.float32)
    if dtype == "BF16":
        return bytes(((floats.view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes())
    return bytes(floats.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())
