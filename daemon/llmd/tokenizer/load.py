"""`Tokenizer`: text <-> ids for frontends, on the `tokenizers` library alone; its ids are the model's.

Decoding goes through the same byte table as streaming (llmd.tokenizer.token_bytes), so a whole text and a joined stream agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import tokenizers
import tokenizers.models

from llmd.errors import ConfigError
from llmd.tokenizer.facts import TokenFacts
from llmd.tokenizer.token_bytes import TokenBytes

#: Characters from which a text goes through `encode_batch_fast`: the library holds the GIL in `encode`, for seconds with a long one,
#: but not there; in return it starts threads of its own, which a short one is not worth.
_LONG = 4096
#: A normalizer may join characters into shorter ones: by this factor at most, whatever Unicode form it makes.
_NORMALIZER_SHRINKS = 4


class Tokenizer:
    """Immutable and safe to use from several threads at once."""

    def __init__(self, inner: tokenizers.Tokenizer, facts: TokenFacts) -> None:
        self._inner = inner
        self._facts = facts
        added = inner.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        vocab = inner.get_vocab(with_added_tokens=True)
        self.size: int = max(vocab.values(), default=-1) + 1
        """Ids run from 0 to size - 1; what a padded embedding has beyond them means nothing."""
        self._bytes_per_token = _most_bytes_per_token(inner, vocab)

    @property
    def bos_token_id(self) -> int | None:
        return self._facts.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._facts.eos_token_ids

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The raw bytes of each id."""
        return TokenBytes.from_json(self._inner.to_str())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids. Lone surrogates count as U+FFFD."""
        text = _well_formed(text)
        if len(text) > _LONG:
            return self.encode_batch([text], add_special_tokens)[0]
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than this can `text` become, special tokens apart; costs no tokenizing. 0 where nothing can be said."""
        return math.ceil(len(text) / self._bytes_per_token)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """`encode` of each text."""
        batch = self._inner.encode_batch_fast([_well_formed(text) for text in texts], add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; an id that the tokenizer does not know is empty, bytes that are not UTF-8 become U+FFFD."""
        decoder = self.token_bytes.decoder(skip_special_tokens=skip_special_tokens)
        return decoder.feed(ids) + decoder.flush()

    def token_text(self, id: int) -> str:
        """Text of one id on its own, special tokens included."""
        return self.token_bytes.raw(id).decode("utf-8", "replace")


def _most_bytes_per_token(inner: tokenizers.Tokenizer, vocab: Iterable[str]) -> float:
    """Bytes of text that one token can stand for at most; infinite where an unknown token can swallow any number of them."""
    model = inner.model
    if not isinstance(model, tokenizers.models.BPE) or (model.fuse_unk and not model.byte_fallback):
        return math.inf
    longest = max(map(len, map(str.encode, vocab)), default=1)
    return longest * (1 if inner.normalizer is None else _NORMALIZER_SHRINKS)


def load_tokenizer(small_dir: Path) -> Tokenizer:
    """The tokenizer of a model's small directory. Raises ConfigError where tokenizer.json is missing or broken."""
    path = small_dir / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="llmd needs the fast tokenizer that most models ship as tokenizer.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a usable tokenizer: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    tokenizer = Tokenizer(inner, TokenFacts.read(small_dir))
    if tokenizer.size == 0:
        raise ConfigError(f"{path}: the tokenizer knows no token")
    return tokenizer


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
