"""A GGUF file's own tokenizer, as the text of a tokenizer.json, and the facts that stand beside it.

Built from the metadata alone (`tokenizer.ggml.*`): byte-level BPE (`gpt2`) with the pre-tokenizer that `tokenizer.ggml.pre`
names, and SentencePiece BPE (`llama`), whose merges follow from the scores. The names and regular expressions of
pre-tokenizers are those of llama.cpp (src/llama-vocab.cpp), the pipelines those of the original models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from llmd.errors import ConfigError

# tokenizer.ggml.token_type (gguf.constants.TokenType)
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: `tokenizer.ggml.pre` -> the regular expressions that split a text, one after the other.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}

#: These take a whole word that is a token before any merge (`ignore_merges`).
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"})

#: Control tokens that end a chat turn, whatever the metadata says of them.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"})


class GgufFacts(Struct, frozen=True):
    """What goes into the config.json and chat_template.jinja beside the tokenizer.json."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """The end token first, then other tokens that end a turn."""
    add_bos: bool
    """An encoded text begins with the bos token."""
    chat_template: str | None


def facts_from_gguf(metadata: Mapping[str, object]) -> GgufFacts:
    """Special tokens and chat template of a GGUF file. Raises ConfigError on ids out of range."""
    tokens, types = _tokens(metadata), _types(metadata)
    eos = [id for name in ("eos", "eot", "eom") if (id := _id(metadata, name, len(tokens))) is not None]
    eos += [id for id, kind in enumerate(types) if kind == _CONTROL and tokens[id] in _TURN_ENDS]
    template = metadata.get("tokenizer.chat_template")
    return GgufFacts(
        bos_token_id=_id(metadata, "bos", len(tokens)),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        add_bos=_adds(metadata, "bos"),
        chat_template=template if isinstance(template, str) and template else None,
    )


def tokenizer_json_from_gguf(metadata: Mapping[str, object]) -> str:
    """Text of a tokenizer.json that tokenizes as the GGUF's model expects. Raises ConfigError, naming what is supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pipeline = _byte_level(metadata)
    elif model == "llama":
        pipeline = _sentencepiece(metadata)
    else:
        raise ConfigError(f"GGUF tokenizer model {model!r} is not supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE) are")
    tokens, types = _tokens(metadata), _types(metadata)
    added = [_added(id, tokens[id], special=kind != _USER_DEFINED) for id, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": _post_processor(metadata, tokens), **pipeline}
    return json.dumps(document, ensure_ascii=False)


def _byte_level(metadata: Mapping[str, object]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ConfigError(f"GGUF pre-tokenizer {pre!r} is not supported: {', '.join(sorted(PRE_TOKENIZERS))} are")
    tokens = _tokens(metadata)
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _sequence(metadata, "tokenizer.ggml.merges", str)
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab]
    splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in PRE_TOKENIZERS[pre]]
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _level(use_regex=False)]},
        "decoder": _level(use_regex=True),
        "model": _bpe(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentencepiece(metadata: Mapping[str, object]) -> dict[str, Any]:
    tokens, types = _tokens(metadata), _types(metadata)
    scores = _sequence(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ConfigError(f"GGUF tokenizer: {len(scores)} scores for {len(tokens)} tokens")
    vocab = {token: id for id, token in enumerate(tokens)}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoders = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((tokens[id] for id, kind in enumerate(types) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, _merges_of_scores(vocab, scores), byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def _merges_of_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the best-scored token; so each way to make a token is a merge of that rank."""
    ranked = []
    for token, id in vocab.items():
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        ranked += [(-scores[id], vocab[left], vocab[right], left, right) for left, right in halves if left in vocab and right in vocab]
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    switches = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **switches, **options, "vocab": vocab, "merges": merges}


def _level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _added(id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def _post_processor(metadata: Mapping[str, object], tokens: Sequence[str]) -> dict[str, Any] | None:
    before = [_id(metadata, "bos", len(tokens))] if _adds(metadata, "bos") else []
    after = [_id(metadata, "eos", len(tokens))] if _adds(metadata, "eos") else []
    ids = [id for id in (*before, *after) if id is not None]
    if not ids:
        return None

    def special(found: list[int | None], segment: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[id], "type_id": segment}} for id in found if id is not None]

    def sequence(name: str, segment: int) -> list[dict[str, Any]]:
        return [*special(before, segment), {"Sequence": {"id": name, "type_id": segment}}, *special(after, segment)]

    named = {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in ids}
    return {"type": "TemplateProcessing", "single": sequence("A", 0), "pair": sequence("A", 0) + sequence("B", 1), "special_tokens": named}


def _adds(metadata: Mapping[str, object], name: str) -> bool:
    """Whether texts get this token; where the file does not say, SentencePiece models take a bos and the rest nothing."""
    default = name == "bos" and metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))


def _id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise ConfigError(f"GGUF tokenizer: {name}_token_id {value!r} is not one of its {size} tokens")
    return value


def _tokens(metadata: Mapping[str, object]) -> Sequence[str]:
    tokens: list[str] = _sequence(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ConfigError("GGUF tokenizer: the file has no tokenizer.ggml.tokens")
    return tokens


def _types(metadata: Mapping[str, object]) -> Sequence[int]:
    types: list[int] = _sequence(metadata, "tokenizer.ggml.token_type", int)
    size = len(_tokens(metadata))
    if types and len(types) != size:
        raise ConfigError(f"GGUF tokenizer: {len(types)} token types for {size} tokens")
    return types or [1] * size


def _sequence(metadata: Mapping[str, object], key: str, kind: type) -> Any:
    """A list of the metadata as Python values (an array of numbers may come as numpy); [] where absent."""
    value = metadata.get(key, [])
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, kind) for item in value):
        raise ConfigError(f"GGUF tokenizer: {key} is not a list of {kind.__name__}")
    return value
