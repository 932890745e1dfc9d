"""`TokenBytes`: token id -> the raw bytes it stands for, read from tokenizer.json; and the incremental decoders made from it.

Two families cover nearly every model: byte-level BPE (each character of a token stands for one byte) and SentencePiece style
(U+2581 is a space, `<0xE4>` a byte, maybe one leading space dropped). Any other decoder pipeline falls back to the tokenizers
library, decoding a short window of ids again and again. Added tokens are always literal.
"""

from __future__ import annotations

import codecs
import re
from encodings import utf_8
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from llmd.errors import ConfigError
from llmd.tokenizer.facts import AddedToken

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPACE = "\u2581"

#: Ids after which a WindowDecoder takes a trailing U+FFFD for what it is: no character is spread over more.
_LONGEST = 8


class TextDecoder(Protocol):
    """Turns the ids of one text, piece by piece, into that text."""

    def feed(self, ids: list[int]) -> str:
        """Text that is certain after these ids; an unfinished character is held back."""
        ...

    def flush(self) -> str:
        """What is still held back, at the end."""
        ...


class ByteDecoder:
    """Joins raw bytes and decodes them as UTF-8 as far as characters are whole; ill-formed bytes become U+FFFD as in a full decode."""

    __slots__ = ("_decoder", "_strip", "_table")

    def __init__(self, table: list[bytes], strip: int) -> None:
        self._table = table
        self._strip = strip
        self._decoder = utf_8.IncrementalDecoder("replace")

    def feed(self, ids: list[int]) -> str:
        table = self._table
        try:
            data = table[ids[0]] if len(ids) == 1 else b"".join([table[id] for id in ids])
        except IndexError:
            data = b"".join([table[id] for id in ids if id < len(table)])
        if self._strip and data:
            data = self._stripped(data)
        if data.isascii() and not self._decoder.buffer:  # what nearly every token is, and four times faster
            return data.decode("ascii")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def _stripped(self, data: bytes) -> bytes:
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return data


class WindowDecoder:
    """For decoders that llmd does not know: text of a window of ids, minus the text of those that were out already.

    The window starts where the last text came out, so that joins (spaces, clean-up) between neighbours are seen.
    """

    def __init__(self, inner: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._inner = inner
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0

    def feed(self, ids: list[int]) -> str:
        out = []
        for id in ids:
            self._ids.append(id)
            before, after = self._text(self._ids[: self._read]), self._text(self._ids)
            unread = len(self._ids) - self._read
            if after == before and unread == 1:
                self._ids.pop()  # a skipped special token: nothing to wait for
            elif len(after) > len(before) and (unread > _LONGEST or not after.endswith("\ufffd")):
                out.append(after[len(before) :])
                self._ids = self._ids[self._read :]
                self._read = len(self._ids)
        return "".join(out)

    def flush(self) -> str:
        before, after = self._text(self._ids[: self._read]), self._text(self._ids)
        self._read = len(self._ids)
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=self._skip)


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerJson(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[AddedToken] = []
    decoder: dict[str, Any] | None = None


class TokenBytes:
    """The table of one tokenizer. About 60 bytes of memory a token."""

    def __init__(self, table: list[bytes], special_ids: frozenset[int], strip: int, fallback: tokenizers.Tokenizer | None) -> None:
        self._table = table
        self._strip = strip
        self._fallback = fallback
        self._visible = [b"" if id in special_ids else data for id, data in enumerate(table)]
        self.special_ids = special_ids

    @property
    def size(self) -> int:
        """Ids from here on are unknown, and empty."""
        return len(self._table)

    @property
    def exact(self) -> bool:
        """Whether the raw bytes are known (else they are each token's text on its own)."""
        return self._fallback is None

    def raw(self, id: int) -> bytes:
        """Bytes of one id, special tokens included; empty for an unknown one."""
        return self._table[id] if 0 <= id < len(self._table) else b""

    def decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one text."""
        if self._fallback is not None:
            return WindowDecoder(self._fallback, skip_special_tokens)
        return ByteDecoder(self._visible if skip_special_tokens else self._table, self._strip)

    @classmethod
    def load(cls, small_dir: Path) -> TokenBytes:
        """Read the tokenizer.json of a model's small directory. Raises ConfigError."""
        path = small_dir / "tokenizer.json"
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

    @classmethod
    def from_json(cls, text: str | bytes) -> TokenBytes:
        """Read the text of a tokenizer.json. Raises ConfigError."""
        try:
            parsed = msgspec.json.decode(text, type=_TokenizerJson)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"tokenizer.json: not a usable tokenizer: {error}") from None
        vocab = parsed.model.vocab if isinstance(parsed.model.vocab, dict) else {piece: id for id, (piece, _) in enumerate(parsed.model.vocab)}
        size = max([*vocab.values(), *(token.id for token in parsed.added_tokens)], default=-1) + 1
        table = [b""] * size
        special = frozenset(token.id for token in parsed.added_tokens if token.special)
        style, strip = _style(parsed.decoder)
        fallback = None
        if style == "byte-level":
            _fill_byte_level(table, vocab)
        elif style == "sentencepiece":
            _fill_sentencepiece(table, vocab)
        else:
            fallback = _library(text)
            for id in vocab.values():
                table[id] = fallback.decode([id], skip_special_tokens=False).encode()
        for token in parsed.added_tokens:
            table[token.id] = token.content.encode()
        return cls(table, special, strip, fallback)


def byte_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: character -> the byte it stands for (printable Latin-1 as itself, the rest from U+0100 on)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _fill_byte_level(table: list[bytes], vocab: dict[str, int]) -> None:
    alphabet: Any = {ord(character): byte for character, byte in byte_characters().items()}
    for piece, id in vocab.items():
        try:
            table[id] = codecs.charmap_encode(piece, "strict", alphabet)[0]
        except UnicodeEncodeError:
            table[id] = piece.encode()


def _fill_sentencepiece(table: list[bytes], vocab: dict[str, int]) -> None:
    for piece, id in vocab.items():
        byte = _BYTE_TOKEN.match(piece)
        table[id] = bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _style(decoder: dict[str, Any] | None) -> tuple[str, int]:
    """(family, leading spaces that a text loses) of a tokenizer.json's decoder."""
    if decoder is None:
        return "unknown", 0
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte-level", 0
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE:
        return "sentencepiece", 0 if steps[0].get("prepend_scheme", "always") == "never" else 1
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        spaces = steps[0].get("pattern") == {"String": _SPACE} and steps[0].get("content") == " "
        strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        if spaces and strip.get("content") == " " and strip.get("stop") == 0:
            return "sentencepiece", int(strip["start"])
    return "unknown", 0


def _library(text: str | bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text if isinstance(text, str) else text.decode())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.json: not a usable tokenizer: {error}") from None
