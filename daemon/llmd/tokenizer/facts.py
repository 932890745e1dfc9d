"""What the small files beside a tokenizer say of it: beginning and end tokens, and their texts for chat templates.

Reads config.json, generation_config.json, tokenizer_config.json and the added tokens of tokenizer.json; each may be absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from llmd.errors import ConfigError

#: Names that chat templates may use for a special token's text.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool = False


class _AddedTokens(msgspec.Struct, frozen=True):
    added_tokens: list[AddedToken] = []


class TokenFacts(msgspec.Struct, frozen=True):
    """Beginning and end of text, as ids and as text."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    texts: dict[str, str]
    """Name of TOKEN_NAMES -> text, where known."""

    @classmethod
    def read(cls, small_dir: Path) -> TokenFacts:
        """Facts of a model's small directory. Raises ConfigError on a file that is not JSON."""
        config = read_json(small_dir / "config.json")
        generation = read_json(small_dir / "generation_config.json")
        named = read_json(small_dir / "tokenizer_config.json")
        texts = {name: text for name in TOKEN_NAMES if (text := _text(named.get(name))) is not None}
        bos, eos = _ids(config.get("bos_token_id")), _ids(config.get("eos_token_id"))
        eos = tuple(dict.fromkeys((*_ids(generation.get("eos_token_id")), *eos)))
        known = _added(small_dir / "tokenizer.json")
        by_text = {token.content: token.id for token in known}
        if not bos and texts.get("bos_token") in by_text:
            bos = (by_text[texts["bos_token"]],)
        if not eos and texts.get("eos_token") in by_text:
            eos = (by_text[texts["eos_token"]],)
        by_id = {token.id: token.content for token in known}
        unknown, padding = _ids(config.get("unk_token_id")), _ids(config.get("pad_token_id"))
        for name, ids in zip(TOKEN_NAMES, (bos, eos, unknown, padding), strict=True):
            if ids and ids[0] in by_id:
                texts.setdefault(name, by_id[ids[0]])
        return cls(bos[0] if bos else None, eos, texts)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file, {} where there is no such file. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a JSON object: {error}") from None


def _added(path: Path) -> list[AddedToken]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_AddedTokens).added_tokens
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []  # whoever needs the tokenizer itself reports what is wrong with it


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, list) else ()


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
