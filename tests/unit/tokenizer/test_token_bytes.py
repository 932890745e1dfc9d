"""A joined stream is the full decode, whatever the ids and however they are cut into pieces."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from llmd.errors import ConfigError
from llmd.tokenizer.token_bytes import TokenBytes
from tests.unit.tokenizer import samples

BYTE_LEVEL = samples.byte_level()
PIECES = samples.sentencepiece()
WORDS = samples.word_piece()

byte_table = TokenBytes.from_json(BYTE_LEVEL)
byte_library = tokenizers.Tokenizer.from_str(BYTE_LEVEL)
piece_table = TokenBytes.from_json(PIECES)
piece_library = tokenizers.Tokenizer.from_str(PIECES)
word_table = TokenBytes.from_json(WORDS)
word_library = tokenizers.Tokenizer.from_str(WORDS)


def stream(table: TokenBytes, chunks: list[list[int]], *, skip: bool = True) -> list[str]:
    decoder = table.decoder(skip_special_tokens=skip)
    return [*(decoder.feed(chunk) for chunk in chunks), decoder.flush()]


def chunks_of(size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, size - 1), max_size=5), max_size=20)


@given(chunks_of(byte_table.size), st.booleans())
def test_byte_level_stream_is_the_full_decode(chunks: list[list[int]], skip: bool) -> None:
    full = byte_library.decode([id for chunk in chunks for id in chunk], skip_special_tokens=skip)
    assert "".join(stream(byte_table, chunks, skip=skip)) == full


@given(st.text(), st.data())
def test_text_cut_into_bytes_streams_without_replacement_characters(text: str, data: st.DataObject) -> None:
    raw = list(text.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    out = stream(byte_table, chunks)
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text


@pytest.mark.parametrize("text", ["\U0001f600", "日本語", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "a\u0301é"])
def test_characters_appear_whole_and_as_soon_as_they_are(text: str) -> None:
    out = stream(byte_table, [[byte] for byte in text.encode()])
    assert out[-1] == ""
    ends = {len(text[: at + 1].encode()) - 1: character for at, character in enumerate(text)}
    assert out[:-1] == [ends.get(index, "") for index in range(len(text.encode()))]


def test_bytes_left_at_the_end_become_one_replacement_character() -> None:
    assert stream(byte_table, [[0xF0, 0x9F], [0x98]]) == ["", "", "\ufffd"]


@given(st.lists(st.lists(st.integers(259, piece_table.size - 1) | st.integers(0, 2), max_size=4), max_size=10), st.booleans())
def test_sentencepiece_stream_is_the_full_decode(chunks: list[list[int]], skip: bool) -> None:
    full = piece_library.decode([id for chunk in chunks for id in chunk], skip_special_tokens=skip)
    assert "".join(stream(piece_table, chunks, skip=skip)) == full


@given(st.text(), st.integers(1, 5))
def test_byte_fallback_gives_the_text_minus_one_leading_space(text: str, size: int) -> None:
    ids = [3 + byte for byte in text.encode()]
    chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert "".join(stream(piece_table, chunks)) == text.removeprefix(" ")


@pytest.mark.parametrize(("decoder", "text"), [("sequence", "Paris Paris"), ("no-strip", " Paris Paris"), ("metaspace", "Paris Paris")])
def test_leading_space_follows_the_decoder(decoder: str, text: str) -> None:
    source = samples.sentencepiece(decoder)
    table = TokenBytes.from_json(source)
    paris = tokenizers.Tokenizer.from_str(source).get_vocab()[f"{samples.SPACE}Paris"]
    assert "".join(stream(table, [[1], [paris], [paris]])) == text
    assert table.raw(paris) == b" Paris"


@given(st.lists(st.lists(st.integers(1, 8), max_size=3), max_size=12))
def test_unknown_family_streams_through_the_library(chunks: list[list[int]]) -> None:
    assert not word_table.exact
    assert "".join(stream(word_table, chunks)) == word_library.decode([id for chunk in chunks for id in chunk], skip_special_tokens=True)


def test_unknown_family_keeps_no_more_ids_than_a_character_needs() -> None:
    decoder = word_table.decoder(skip_special_tokens=True)
    assert [decoder.feed([0]) for _ in range(2000)] == [""] * 2000
    assert decoder.feed([2, 3]) + decoder.flush() == "cats"


def test_special_tokens_are_skipped_on_wish_and_literal_otherwise() -> None:
    end, tool = byte_table.size - 2, byte_table.size - 1
    assert stream(byte_table, [[97, end, tool]]) == ["a<tool>", ""]
    assert stream(byte_table, [[97, end, tool]], skip=False) == ["a<|end|><tool>", ""]
    assert byte_table.raw(end) == b"<|end|>"


def test_ids_beyond_the_tokenizer_are_empty() -> None:
    assert stream(byte_table, [[97, 100_000], [98]]) == ["a", "b", ""]
    assert byte_table.raw(100_000) == byte_table.raw(-1) == b""


def test_broken_file_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        TokenBytes.from_json("{")
