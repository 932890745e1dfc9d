"""Loading: ids as the library gives them, faults as ConfigError with the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmd.errors import ConfigError
from llmd.tokenizer.load import load_tokenizer
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
