"""Small tokenizers of each family, as the text of a tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

from llmd.tokenizer.token_bytes import byte_characters

SPACE = "\u2581"


def added(id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def document(vocab: dict[str, int], decoder: Any, tokens: list[dict[str, Any]], **model: Any) -> str:
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": [], **model}
    rest = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    return json.dumps({**rest, "added_tokens": tokens, "decoder": decoder, "model": bpe})


def byte_level() -> str:
    """Ids 0 to 255 are bytes, then pieces (a word, halves of an emoji), a special token and an added one that is not special."""
    letters = {byte: character for character, byte in byte_characters().items()}
    pieces = [b" hello", "\U0001f600".encode()[:2], "\U0001f600".encode()[2:], "日本".encode(), "本".encode()[:2]]
    vocab = {letters[byte]: byte for byte in range(256)}
    vocab |= {"".join(letters[byte] for byte in piece): 256 + index for index, piece in enumerate(pieces)}
    size = len(vocab)
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return document(vocab, decoder, [added(size, "<|end|>", special=True), added(size + 1, "<tool>", special=False)])


def sentencepiece(decoder: str = "sequence") -> str:
    """<unk>, <s>, </s>, 256 byte tokens, then pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, f"{SPACE}Paris", f"{SPACE}{SPACE}", "a", "é", "日", "\U0001f600"]
    vocab = {name: id for id, name in enumerate(names)}
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders = {
        "sequence": {"type": "Sequence", "decoders": [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "no-strip": {"type": "Sequence", "decoders": steps},
        "metaspace": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False},
    }
    return document(vocab, decoders[decoder], [added(id, names[id], special=True) for id in range(3)], byte_fallback=True)


def word_piece() -> str:
    """A family that llmd does not know the bytes of."""
    names = ["[UNK]", "the", "cat", "##s", "play", "##ing", ".", "日", "'"]
    vocab = {name: id for id, name in enumerate(names)}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab}
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    rest = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None}
    return json.dumps({**rest, "added_tokens": [added(0, "[UNK]", special=True)], "decoder": decoder, "model": model})
