"""Directories and automatic values follow from the configuration, the environment and the model's files alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmd.config.load import load_config
from llmd.config.resolve import LONGEST_RUN_DIR, Dirs, default_run_dir, resolve_args, resolve_dirs
from llmd.errors import ConfigError, ResourceError
from llmd.plan.ports import PortArgs
from llmd.plan.spec import ModelFiles

UID = os.getuid()
FILES = ModelFiles(
    kind="gguf",
    path="/m.gguf",
    name="m",
    small_dir="/s",
    weights_version="m@0",
    weights_bytes=1,
    context_length=8192,
    vocab_size=10,
    tokenizer_size=10,
    eos_token_ids=(0,),
    bos_token_id=None,
    add_bos=False,
    has_chat_template=False,
    architecture="llama",
    quantization="Q4_1",
)


def dirs(*overrides: str, **environ: str) -> Dirs:
    return resolve_dirs(load_config(None, list(overrides), {}).args, environ)


def test_a_user_gets_their_own_directories() -> None:
    found = dirs(HOME="/home/me", XDG_RUNTIME_DIR="/run/user/7", XDG_CACHE_HOME="/c")
    assert found == Dirs("/run/user/7/llmd", "/home/me/.local/state/llmd", "/c/llmd", "/home/me/.local/state/llmd/log")


def test_systemd_says_where() -> None:
    found = dirs(
        RUNTIME_DIRECTORY="/run/llmd-a:/run/b",
        STATE_DIRECTORY="/var/lib/llmd",
        CACHE_DIRECTORY="/var/cache/llmd",
        LOGS_DIRECTORY="/var/log/llmd",
        XDG_RUNTIME_DIR="/x",
    )
    assert found == Dirs("/run/llmd-a", "/var/lib/llmd", "/var/cache/llmd", "/var/log/llmd")


def test_the_configuration_goes_first() -> None:
    found = dirs("run_dir=/a", "state_dir=/b", "cache_dir=/c", RUNTIME_DIRECTORY="/run/llmd", STATE_DIRECTORY="/var/lib/llmd", HOME="/h")
    assert found == Dirs("/a", "/b", "/c", "/b/log")


def test_no_home_at_all_is_survived() -> None:
    assert all(os.path.isabs(path) for path in (dirs().state_dir, dirs(HOME="relative").cache_dir, dirs(XDG_STATE_HOME="x").state_dir))


def test_run_dir_falls_back_to_a_short_one() -> None:
    long = "/" + "x" * 90
    assert default_run_dir({"TMPDIR": "/t"}) == f"/t/llmd-{UID}"
    assert default_run_dir({"XDG_RUNTIME_DIR": long, "TMPDIR": "/t"}) == f"/t/llmd-{UID}"
    assert default_run_dir({"XDG_RUNTIME_DIR": long, "TMPDIR": long}) == f"/tmp/llmd-{UID}"
    assert default_run_dir({"XDG_RUNTIME_DIR": "relative", "TMPDIR": "/t"}) == f"/t/llmd-{UID}"


def test_the_limit_is_that_of_the_sockets() -> None:
    fits = "/" + "x" * (LONGEST_RUN_DIR - 1)
    PortArgs(run_dir=fits).check(64)
    with pytest.raises(ResourceError):
        PortArgs(run_dir=fits + "x").check(64)


def test_automatic_values_are_filled_in() -> None:
    args = resolve_args(load_config(None, [], {}).args, FILES, threads=3)
    assert (args.model.context_length, args.model.threads, args.model.kv_cache_dtype, args.model.quantization) == (8192, 3, "bfloat16", "auto")
    assert (args.memory.max_running_requests, args.scheduler.chunked_prefill_size) == (64, "auto")


def test_configured_values_stay() -> None:
    overrides = [
        "model.context_length=100",
        "model.threads=1",
        "memory.max_running_requests=2",
        "scheduler.chunked_prefill_size=16",
        "model.kv_cache_dtype=bfloat16",
    ]
    args = resolve_args(load_config(None, [*overrides, "model.dtype=float32"], {}).args, FILES, threads=3)
    assert (args.model.context_length, args.model.threads, args.model.kv_cache_dtype, args.model.quantization) == (100, 1, "bfloat16", "none")
    assert (args.memory.max_running_requests, args.scheduler.chunked_prefill_size) == (2, 16)


def test_float32_means_float32_everywhere() -> None:
    model = resolve_args(load_config(None, ["model.dtype=float32"], {}).args, FILES, threads=1).model
    assert (model.kv_cache_dtype, model.quantization) == ("float32", "none")


def test_a_context_longer_than_the_models_is_refused() -> None:
    args = load_config(None, ["model.context_length=8193"], {}).args
    with pytest.raises(ConfigError, match=r"model\.context_length: 8193 is more than the 8192"):
        resolve_args(args, FILES, threads=1)


def test_a_model_whose_context_has_no_room_for_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context of 7 tokens"):
        resolve_args(load_config(None, [], {}).args, replace(FILES, context_length=7), threads=1)


def test_nothing_is_created(tmp_path: Path) -> None:
    dirs(HOME=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
