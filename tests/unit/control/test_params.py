"""Parameters of verbs: from a query or JSON, every fault named; and which weights may replace which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmd.config import ServerArgs
from llmd.config.server_args import ReloadArgs
from llmd.control import weights
from llmd.control.params import convert
from llmd.control.verbs import VERBS, FlushParams, ReloadParams
from llmd.errors import RequestError
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles

FILES = ModelFiles(
    kind="safetensors", path="/models/a", name="a", small_dir="", weights_version="a@1", weights_bytes=1, context_length=64, vocab_size=300, tokenizer_size=300,
    eos_token_ids=(2,), bos_token_id=1, add_bos=True, has_chat_template=True, architecture="llama", quantization="float32",
)  # fmt: skip


def boot(allowed: tuple[str, ...] | None, model: Path, cache: Path) -> Boot:
    return Boot(
        start_id="s", started_at=0, args=ServerArgs(reload=ReloadArgs(allowed_dirs=allowed)), ports=PortArgs("/r"), processes=(), http_url="",
        files=msgspec.structs.replace(FILES, path=str(model)), state_dir="", cache_dir=str(cache), log_dir="",
    )  # fmt: skip


def test_a_query_string_is_typed() -> None:
    assert convert({"timeout_s": "30"}, FlushParams) == FlushParams(timeout_s=30.0)
    assert convert({"path": "/x", "mode": "now"}, ReloadParams).mode == "now"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": "x"}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": "inf"}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"other": 1}, "other"),
    ],
)
def test_a_fault_names_its_parameter(raw: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        convert(raw, FlushParams)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_every_verb_says_what_it_does() -> None:
    assert all(kind.__doc__ for kind in VERBS.values())


def test_allowed_directories_hold_against_links_and_dots(tmp_path: Path) -> None:
    model, cache, outside = (tmp_path / name for name in ("model", "cache", "outside"))
    for directory in (model, cache, outside):
        directory.mkdir()
    (model / "link").symlink_to(outside)
    default = boot(None, model, cache)
    assert weights.allowed_path(default, str(model)) == str(model)
    assert weights.allowed_path(default, str(cache)) == str(cache)
    for path in (outside, model / "link", model / ".." / "outside", tmp_path):
        with pytest.raises(RequestError) as caught:
            weights.allowed_path(default, str(path))
        assert (caught.value.code, caught.value.status) == ("forbidden", 403)
    only = boot((str(outside),), model, cache)
    assert weights.allowed_path(only, str(model / "link")) == str(outside)
    with pytest.raises(RequestError) as caught:
        weights.allowed_path(default, str(model / "none"))
    assert (caught.value.code, caught.value.status) == ("not_found", 404)


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        ({}, {}, ""),
        ({"weights_version": "b@2", "name": "b", "weights_bytes": 5}, {}, ""),
        ({"architecture": "qwen", "vocab_size": 5}, {"hidden_size": 9}, "architecture"),
        ({"vocab_size": 5}, {"hidden_size": 9}, "vocab_size"),
        ({}, {"hidden_size": 9, "num_hidden_layers": 9}, "hidden_size"),
        ({}, {"num_hidden_layers": 9}, "num_hidden_layers"),
        ({"quantization": "bfloat16"}, {}, "quantization"),
    ],
)
def test_the_first_mismatch_is_named(tmp_path: Path, change: dict[str, Any], config: dict[str, Any], named: str) -> None:
    base = {"hidden_size": 8, "num_hidden_layers": 2}
    for name, content in (("here", base), ("there", {**base, **config})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(msgspec.json.encode(content))
    running = msgspec.structs.replace(FILES, small_dir=str(tmp_path / "here"))
    other = msgspec.structs.replace(FILES, small_dir=str(tmp_path / "there"), **change)
    assert weights.mismatch(running, other).startswith(named)
    assert bool(weights.mismatch(running, other)) == bool(named)
