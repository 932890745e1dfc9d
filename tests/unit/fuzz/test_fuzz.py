"""Files that somebody else wrote, damaged at random: a clear error or a good answer, never a crash, a hang or memory without bound.

Short in every run; `-m soak` goes on for ten minutes each (LLMD_TEST_FUZZ_S seconds).
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from llmd.config.check import check_args
from llmd.config.load import load_config
from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError, LlmdError
from llmd.store.model_files import model_files
from tests.models import gguf_of, random_llama

SHIPPED = Path(__file__).parents[3] / "etc/llmd/llmd.yaml"
SOAK_S = float(os.environ.get("LLMD_TEST_FUZZ_S", "600"))
#: Bytes that a process may have grown by, over thousands of files.
GROWTH = 300 * 2**20

#: Numbers where length and offset checks go wrong.
NUMBERS = [0, 1, 7, 8, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1]
#: What breaks parsers of text.
WORDS = [
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"&a",
    b"*a",
    b"!!python/object:os.system",
    b"<<:",
    b"{",
    b"[",
    b"}",
    b'"',
    b"-",
    b": ",
    b"\t",
    b"\n",
    b"1e999",
    b"-1",
    b"NaN",
    b"null",
]


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to six changes of a file's bytes."""
    kinds = st.sampled_from(["cut", "flip", "number", "insert", "drop", "repeat", "word"])
    steps = draw(st.lists(st.tuples(kinds, st.floats(0, 1), st.sampled_from(NUMBERS), st.binary(max_size=24), st.sampled_from(WORDS)), min_size=1, max_size=6))

    def apply(data: bytes) -> bytes:
        for kind, share, number, noise, word in steps:
            # Headers are at the front, so most places are.
            at = int(share**4 * len(data))
            match kind:
                case "cut":
                    data = data[:at]
                case "flip":
                    data = data[:at] + bytes(byte ^ 0x5A for byte in data[at : at + 1]) + data[at + 1 :]
                case "number":
                    data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
                case "insert":
                    data = data[:at] + noise + data[at:]
                case "drop":
                    data = data[:at] + data[at + len(noise) + 1 :]
                case "repeat":
                    data = data[:at] + data[at : at + 200] * 3 + data[at + 200 :]
                case "word":
                    data = data[:at] + word + data[at:]
        return data

    return apply


def read_yaml(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        check_args(load_config(str(path), [], {}).args, allow_failpoints=False)
    except ConfigError as error:
        faults = error.faults
    else:
        return
    assert all(fault and "\n" not in fault for fault in faults)


def read_model(path: Path, cache: Path) -> None:
    try:
        model_files(ModelArgs(path=str(path)), cache)
    except LlmdError as error:
        message = error.message
    else:
        return
    assert message and len(message) < 20_000


def run(test: Callable[[Any], None], strategy: st.SearchStrategy[Any], examples: int, start: int | None = None) -> None:
    """`test` on `examples` values; one that takes longer than 2 s fails."""
    phases = (Phase.explicit, Phase.generate) if start is not None else (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    checks = list(HealthCheck)
    decorated = settings(max_examples=examples, deadline=2000, database=None, suppress_health_check=checks, phases=phases)(given(strategy)(test))
    (seed(start)(decorated) if start is not None else decorated)()


def soak(test: Callable[[Any], None], strategy: st.SearchStrategy[Any]) -> None:
    """`test` on new values for SOAK_S seconds; memory must not grow."""
    process, until = psutil.Process(), time.monotonic() + SOAK_S
    run(test, strategy, 50)
    before = process.memory_info().rss
    while time.monotonic() < until:
        run(test, strategy, 500, random.randrange(2**31))
        assert process.memory_info().rss - before < GROWTH


@pytest.fixture
def yaml_test(tmp_path: Path) -> tuple[Callable[[Any], None], st.SearchStrategy[Any]]:
    shipped = SHIPPED.read_bytes()
    # Everything in the shipped file is a comment or a default; without the comments it is dense.
    dense = b"\n".join(line.partition(b" #")[0] for line in shipped.splitlines() if line.strip() and not line.lstrip().startswith(b"#"))
    texts = st.one_of(
        st.binary(max_size=300), st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")), damage().map(lambda hurt: hurt(dense))
    )
    return lambda data: read_yaml(tmp_path / "f.yaml", data), texts


@pytest.fixture
def gguf_test(tmp_path: Path) -> tuple[Callable[[Any], None], st.SearchStrategy[Any]]:
    whole = gguf_of(random_llama(tmp_path / "m", layers=1), tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "f.gguf"

    def test(hurt: Callable[[bytes], bytes]) -> None:
        path.write_bytes(hurt(whole))
        read_model(path, tmp_path / "cache")

    return test, damage()


@pytest.fixture
def safetensors_test(tmp_path: Path) -> tuple[Callable[[Any], None], st.SearchStrategy[Any]]:
    directory = random_llama(tmp_path / "m", layers=1, shards=2)
    names = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    whole = {name: (directory / name).read_bytes() for name in names}
    json.loads(whole["config.json"])

    def test(chosen: tuple[str, Callable[[bytes], bytes]]) -> None:
        name, hurt = chosen
        (directory / name).write_bytes(hurt(whole[name]))
        try:
            read_model(directory, tmp_path / "cache")
        finally:
            (directory / name).write_bytes(whole[name])

    return test, st.tuples(st.sampled_from(names), damage())


KINDS = ["yaml_test", "gguf_test", "safetensors_test"]
SHORT = {"yaml_test": 300, "gguf_test": 120, "safetensors_test": 120}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_an_error_or_harmless(request: pytest.FixtureRequest, kind: str) -> None:
    test, strategy = request.getfixturevalue(kind)
    run(test, strategy, SHORT[kind])


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 300)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_for_minutes(request: pytest.FixtureRequest, kind: str) -> None:
    soak(*request.getfixturevalue(kind))
