"""The small files of the model `dummy`: a tokenizer whose ids 0 to 255 are the bytes themselves, then <s> and </s>."""

from __future__ import annotations

import json
from typing import Any, Final

from llmd.tokenizer.token_bytes import byte_characters

BOS: Final = 256
EOS: Final = 257
VOCAB_SIZE: Final = 258
CONTEXT_LENGTH: Final = 8192
#: The scripted runner keeps the token itself.
KV_VALUES_PER_TOKEN: Final = 1
VERSION: Final = "dummy@000000000000"
#: A chat is its messages' texts, one after the other, so that what the scripted runner echoes can be foretold.
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_tokenizer(specials: dict[str, int]) -> dict[str, Any]:
    """A tokenizer.json: byte-level BPE without merges, id = byte; `specials` come behind."""
    added = [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, id in specials.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": byte_characters(),
        "merges": [],
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip


def small_files() -> dict[str, bytes]:
    """tokenizer.json, config.json and chat_template.jinja."""
    config = {"model_type": "dummy", "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": BOS, "eos_token_id": EOS}
    return {
        "tokenizer.json": json.dumps(byte_tokenizer({"<s>": BOS, "</s>": EOS}), ensure_ascii=False).encode(),
        "config.json": json.dumps(config).encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
