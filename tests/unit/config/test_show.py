"""The printed configuration names each value's source, hides secrets and reads back to the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmd.config.fields import FIELDS
from llmd.config.load import Loaded, load_config
from llmd.config.show import redact_url, render, scalar
from llmd.config.values import value_of
from tests.unit.config.examples import other_text


def again(loaded: Loaded, tmp_path: Path) -> Loaded:
    file = tmp_path / "again.yaml"
    file.write_text(render(loaded), encoding="utf-8")
    return load_config(str(file), [], {})


def test_defaults_read_back(tmp_path: Path) -> None:
    loaded = load_config(None, [], {})
    assert again(loaded, tmp_path).args == loaded.args


def test_every_key_reads_back(tmp_path: Path) -> None:
    loaded = load_config(None, [f"{key}={other_text(field)}" for key, field in FIELDS.items()], {})
    assert all(value_of(loaded.args, key) != field.default for key, field in FIELDS.items())
    assert again(loaded, tmp_path).args == loaded.args
    assert all(origin.startswith("file ") for origin in again(loaded, tmp_path).origins.values())


def test_each_line_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "llmd.yaml"
    file.write_text("http:\n  workers: 2\n")
    text = render(load_config(str(file), ["http.port=3"], {"LLMD_HTTP__BACKLOG": "9"}))
    lines = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in text.splitlines() if "  # " in line}
    assert lines["port"] == "flag --set"
    assert lines["workers"] == f"file {file}:2"
    assert lines["backlog"] == "environment LLMD_HTTP__BACKLOG"
    assert lines["host"] == "default"
    assert set(lines) == {field.leaf for field in FIELDS.values()}


@pytest.mark.parametrize(
    "text", ["no", "null", "1", "1e3", "::1", "a: b", "#x", "2024-01-01", "", " ", "é", "'", '"', "0x1", "~", "- a", "{", "1:30", "=", "\x7f", "\x85", "\u2028"]
)
def test_text_that_yaml_would_misread_is_quoted(text: str, tmp_path: Path) -> None:
    loaded = load_config(None, [], {"LLMD_MODEL__SERVED_NAME": f"x{text}", "LLMD_HTTP__HOST": text})
    assert again(loaded, tmp_path).args == loaded.args


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20))
def test_any_text_reads_back(text: str) -> None:
    loaded = load_config(None, [f"http.host={text}"], {})
    assert loaded.args.http.host == text
    assert load_config(None, [f"http.access_log_exclude=[{scalar(text)}]"], {}).args.http.access_log_exclude == (text,)


def test_secrets_are_hidden() -> None:
    text = render(load_config(None, ["observability.tracing.otlp_endpoint=https://me:SECRET@collector:4317/v1"], {}))
    assert "SECRET" not in text and "https://***@collector:4317/v1" in text
    assert redact_url("http://plain/x") == "http://plain/x"
