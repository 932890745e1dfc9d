"""Loading: ids as the library gives them, faults as ConfigError with the path."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models

from llmd.errors import ConfigError
from llmd.tokenizer.load import load_tokenizer
from tests.daemon import least
from tests.unit.tokenizer import samples


def small_dir(tmp_path: Path, config: str = "{}") -> Path:
    (tmp_path / "tokenizer.json").write_text(samples.byte_level())
    (tmp_path / "config.json").write_text(config)
    return tmp_path


def test_round_trip_and_facts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_dir(tmp_path, '{"bos_token_id": null, "eos_token_id": [261]}'))
    assert (tokenizer.size, tokenizer.special_ids, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (263, frozenset({261}), None, (261,))
    assert tokenizer.encode("a<|end|>", add_special_tokens=False) == [97, 261]
    assert tokenizer.encode_batch(["a", "bc"], add_special_tokens=False) == [[97], [98, 99]]
    assert tokenizer.decode([97, 261, 99_999], skip_special_tokens=True) == "a"
    assert tokenizer.token_text(261) == "<|end|>"
    assert tokenizer.token_text(0xF0) == "\ufffd"


def test_lone_surrogates_count_as_replacement_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_dir(tmp_path))
    assert tokenizer.encode("a\ud83d", add_special_tokens=False) == tokenizer.encode("a\ufffd", add_special_tokens=False)


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}', "[]"])
def test_missing_or_broken_file_is_a_config_error_with_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_broken_config_is_a_config_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: "):
        load_tokenizer(small_dir(tmp_path, "{"))


def test_the_least_number_of_tokens_is_never_too_many(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "aa": 1, "aaaa": 2}, [("a", "a"), ("aa", "aa")]))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for length in range(40):
        assert tokenizer.least_tokens("a" * length) <= len(tokenizer.encode("a" * length, False))
    assert tokenizer.least_tokens("a" * 4000) == 1000


def test_where_unknown_text_can_be_one_token_nothing_is_said(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).least_tokens("b" * 1000) == 0


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    vocabulary = {chr(c): c - 97 for c in range(97, 123)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert least(lambda: longest_gap(tokenizer), 0.5) < 0.5, "the encoder gives way to others"


def longest_gap(tokenizer: Any) -> float:
    """The longest time that another thread has to wait while a long text is encoded, as a part of the whole."""
    text = "abcdefghijklmnopqrstuvwxyz" * 40_000
    worker = threading.Thread(target=tokenizer.encode, args=(text, False))
    worker.start()
    gaps, last = [0.0], time.monotonic()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - last)
        last = now
    assert len(gaps) > 10, "the text is long enough to notice"
    return max(gaps) / sum(gaps)
