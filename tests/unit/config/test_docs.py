"""The shipped file and the manual are what the fields say, and the shipped file works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmd.config.check import DUMMY
from llmd.config.docs import main, manual, sample
from llmd.config.fields import FIELDS
from llmd.config.load import load_config
from llmd.config.schema import schema
from llmd.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("path", "content"), [("etc/llmd/llmd.yaml", sample), ("docs/configuration.md", manual), ("etc/llmd/llmd.schema.json", schema)])
def test_written_files_are_current(path: str, content: object, tmp_path: Path) -> None:
    assert callable(content)
    assert (ROOT / path).read_text(encoding="utf-8") == content(), "run: python -m llmd.config.docs ."
    main([str(tmp_path)])
    assert (tmp_path / path).read_text(encoding="utf-8") == content()


def test_the_shipped_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(str(ROOT / "etc/llmd/llmd.yaml"), [], {}).args == load_config(None, [], {}).args


def test_uncommented_it_still_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(re.sub(r"(?m)^(\s*)#(?=[a-z_]+: )", r"\1", sample()))
    loaded = load_config(str(file), [], {})
    assert loaded.args == load_config(None, [], {}).args
    assert all(origin.startswith("file ") for origin in loaded.origins.values()) and len(loaded.origins) == len(FIELDS)


def test_every_key_is_in_the_manual() -> None:
    assert all(f"**`{key}`**" in manual() for key in FIELDS)


@pytest.mark.parametrize("content", [sample, manual, schema])
def test_what_only_tests_may_use_is_in_no_page_for_operators(content: Callable[[], str]) -> None:
    assert DUMMY not in content()


def test_the_schema_has_every_key_with_what_may_be_written() -> None:
    root = json.loads(schema())
    for field in FIELDS.values():
        node = root
        for part in field.key.split("."):
            assert node.get("additionalProperties", False) is False
            node = node["properties"][part]
        assert field.text in node["description"]
    http = root["properties"]["http"]["properties"]
    assert http["drain_timeout"]["default"] == "30s" and http["max_body"]["default"] == "8MiB"
    assert http["port"]["maximum"] == 65535


@pytest.mark.parametrize("text", ["30s", "1.5 min", "500ms", "1d"])
def test_the_pattern_of_durations_takes_what_the_loader_takes(text: str) -> None:
    assert re.search(DURATION_PATTERN, text) and parse_duration(text) > 0
    assert not re.search(DURATION_PATTERN, text.rstrip("smind"))


@pytest.mark.parametrize("text", ["8MiB", "512", "1 GB"])
def test_the_pattern_of_sizes_takes_what_the_loader_takes(text: str) -> None:
    assert re.search(SIZE_PATTERN, text) and parse_size(text) > 0
