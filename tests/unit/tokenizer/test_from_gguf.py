"""A GGUF's tokenizer, rebuilt from its metadata, tokenizes as its model was trained to read."""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.errors import ConfigError
from llmd.tokenizer.facts import TokenFacts
from llmd.tokenizer.from_gguf import PRE_TOKENIZERS, facts_from_gguf, tokenizer_json_from_gguf
from llmd.tokenizer.load import Tokenizer
from llmd.tokenizer.token_bytes import byte_characters
from tests.unit.tokenizer.samples import SPACE

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "reference_greedy.json").read_text())


def byte_level(**more: object) -> dict[str, object]:
    tokens = [*byte_characters(), "\u0120a", "12", "123", "ab", "<|im_end|>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    merges = ["\u0120 a", "1 2", "12 3", "a b", "x y"]
    base: dict[str, object] = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in base.items()}


def sentencepiece(**more: object) -> dict[str, object]:
    letters = [(letter, -1e9) for letter in (SPACE, "h", "e", "l", "o")]
    pieces = [*letters, ("he", -1.0), ("ll", -2.0), ("hell", -3.0), ("hello", -4.0), (f"{SPACE}hello", -5.0)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [*[0.0] * 259, *(score for _, score in pieces)]
    base = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in base.items()}


def built(metadata: dict[str, object]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json_from_gguf(metadata))


def pieces_of(metadata: dict[str, object], text: str) -> list[str]:
    return list(built(metadata).encode(text, add_special_tokens=False).tokens)


def test_smollm_splits_digits_one_by_one() -> None:
    assert pieces_of(byte_level(), "ab123 a") == ["ab", "1", "2", "3", "\u0120a"]
    assert pieces_of(byte_level(pre="llama-bpe"), "ab123 a") == ["ab", "123", "\u0120a"]


def test_smollm_equals_the_original_pipeline() -> None:
    ours = built(byte_level())
    theirs = built(byte_level())
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, level])
    for text in map("".join, itertools.product(["a", " ", "1", "½", "²", "٣", "'s", "\n", "日"], repeat=4)):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_gives_the_text_back(pre: str) -> None:
    tokenizer = built(byte_level(pre=pre))
    text = "It's 1234 ½ ² ٣, don't!\r\n\n  日本 \U0001f600\t<b> +++ a"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_special_and_user_defined_are_not() -> None:
    tokenizer = built(byte_level())
    ids = tokenizer.encode("ab<tool><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    end = 256 + 4
    tokenizer = built(byte_level(add_bos_token=True, add_eos_token=True, bos_token_id=end, eos_token_id=end))
    assert tokenizer.encode("ab").ids == [end, 256 + 3, end]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [256 + 3]
    assert built(sentencepiece()).encode("hello").tokens == ["<s>", f"{SPACE}hello"]
    assert built(sentencepiece(add_bos_token=False)).encode("hello").tokens == [f"{SPACE}hello"]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = built(sentencepiece(add_bos_token=False))
    assert tokenizer.encode("hello hell").tokens == [f"{SPACE}hello", SPACE, "hell"]
    assert tokenizer.encode("é").tokens == [SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello é hell").ids) == "hello é hell"
    assert built(sentencepiece(add_bos_token=False, add_space_prefix=False)).encode("hello").tokens == ["hello"]


def by_score(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece's rule word for word: join the neighbours that make the best-scored token, the leftmost first, while there are any."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joins = [(-score[pair], at) for at, pair in enumerate(map("".join, itertools.pairwise(symbols))) if pair in score]
        if not joins:
            return symbols
        _, at = min(joins)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=10, max_size=30), st.lists(st.text("abc ", min_size=1, max_size=25), max_size=5))
def test_sentencepiece_equals_its_rule_on_any_vocabulary(joins: list[tuple[int, int]], texts: list[str]) -> None:
    pieces = [SPACE, "a", "b", "c"]
    for left, right in joins:
        piece = pieces[left % len(pieces)] + pieces[right % len(pieces)]
        pieces += [piece] if piece not in pieces else []
    scores = [-float(at) for at in range(len(pieces))]
    tokens = ["<unk>", "<s>", "</s>", *pieces]
    tokenizer = built(sentencepiece(tokens=tokens, token_type=[2, 3, 3, *[1] * len(pieces)], scores=[0.0] * 3 + scores, add_bos_token=False))
    for text in texts:
        assert tokenizer.encode(text).tokens == by_score(text, dict(zip(pieces, scores, strict=True)))


def test_facts() -> None:
    facts = facts_from_gguf({**byte_level(bos_token_id=0, eos_token_id=1), "tokenizer.chat_template": "T"})
    assert (facts.bos_token_id, facts.eos_token_ids, facts.add_bos, facts.chat_template) == (0, (1, 260), False, "T")
    assert facts_from_gguf(sentencepiece()).add_bos


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "gpt2 .* and llama"),
        (byte_level(model="bert"), "'bert' is not supported"),
        (byte_level(pre="martian"), "'martian' is not supported: .*smollm"),
        (byte_level(tokens=[]), "no tokenizer.ggml.tokens"),
        (byte_level(token_type=[1]), "1 token types"),
        (byte_level(merges=[1, 2]), "not a list of str"),
        (sentencepiece(scores=[1.0]), "1 scores"),
        (byte_level(bos_token_id=10**6, add_bos_token=True), "bos_token_id"),
    ],
)
def test_what_cannot_work_is_a_config_error(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tokenizer_json_from_gguf(metadata)


@cache
def embedded() -> tuple[Tokenizer, str]:
    from llmd.store.catalog import pulled_path
    from llmd.store.gguf import GgufFile

    cache_dir = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmd"
    path = pulled_path("smollm2-135m-instruct", cache_dir)
    if path is None:
        pytest.skip("the embedded model is not in the cache: llmd pull smollm2-135m-instruct")
    metadata = GgufFile(path).metadata
    template = facts_from_gguf(metadata).chat_template
    assert template is not None
    return Tokenizer(built(metadata), TokenFacts(None, (), {})), template


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['mode']}: {case['prompt'][:20]}")
def test_embedded_model_equals_the_reference(case: dict[str, Any]) -> None:
    from llmd.tokenizer.chat import ChatTemplate

    tokenizer, template = embedded()
    assert tokenizer.encode(case["prompt_text"], add_special_tokens=False) == case["prompt_ids"]
    for weights in ("bf16w", "f32w"):
        assert tokenizer.decode(case[weights]["token_ids"], skip_special_tokens=True) == case[weights]["text"]
    if case["mode"] == "chat":
        assert ChatTemplate(template).render([{"role": "user", "content": case["prompt"]}]) == case["prompt_text"]


@settings(max_examples=200)
@given(text=st.text())
def test_embedded_model_gives_back_every_text_that_it_has_tokens_for(text: str) -> None:
    tokenizer, _ = embedded()
    known = {tokenizer.token_bytes.raw(id) for id in range(tokenizer.size)}  # its vocabulary lacks 21 bytes, 0xF1 and U+0006 among them
    text = "".join(character for character in text if all(bytes([byte]) in known for byte in character.encode()))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
