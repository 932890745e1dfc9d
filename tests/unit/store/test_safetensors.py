"""A directory of safetensors is whole, or every fault in it is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmd.errors import ConfigError
from llmd.store.safetensors_dir import SafetensorsDir, SafetensorsFile
from tests.models import random_llama, read_checkpoint, write_safetensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("st") / "model", layers=1)


def test_tensors_are_where_the_reference_library_finds_them(whole: Path) -> None:
    found, (_, expected) = SafetensorsDir(whole), read_checkpoint(whole)
    assert set(found.tensors) == set(expected)
    for name, tensor in found.tensors.items():
        assert np.array_equal(found.raw(tensor).view("<f4").reshape(tensor.shape), expected[name])


def test_shards_with_an_index(tmp_path: Path, whole: Path) -> None:
    sharded = SafetensorsDir(random_llama(tmp_path / "m", layers=1, shards=3))
    assert len(sharded.shards) == 3
    assert set(sharded.tensors) == set(SafetensorsDir(whole).tensors)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", layers=1, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: No such file"):
        SafetensorsDir(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: the file is missing"):
        SafetensorsDir(path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", layers=1, shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.*'model\.extra\.weight'.*not in this file"):
        SafetensorsDir(path)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", layers=1, shards=3)
    (path / "model-00001-of-00003.safetensors").unlink()
    broken = path / "model-00002-of-00003.safetensors"
    broken.write_bytes(broken.read_bytes()[:-10])
    with pytest.raises(ConfigError) as caught:
        SafetensorsDir(path)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", "a/b.safetensors"])
def test_an_index_cannot_point_outside(tmp_path: Path, name: str) -> None:
    path = random_llama(tmp_path / "m", layers=1)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError, match="not the name of a safetensors file"):
        SafetensorsDir(path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="pickle"):
        SafetensorsDir(tmp_path)


def test_what_is_no_safetensors_file_is_named(tmp_path: Path, whole: Path) -> None:
    raw = (whole / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    wrong = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    hole = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    for data, text in (
        (b"", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (struct.pack("<Q", 2**62) + b"{}", "its header says"),
        (raw[: 8 + length // 2], "its header says"),
        (raw[:-1], "truncated"),
        (raw + b"\0", "followed by bytes"),
        (struct.pack("<Q", 4) + b"nope", "damaged safetensors header"),
        (struct.pack("<Q", 2000) + b"[" * 2000, "damaged safetensors header"),
        (struct.pack("<Q", len(wrong)) + wrong + b"\0" * 4, "of shape"),
        (struct.pack("<Q", len(hole)) + hole + b"\0" * 8, "of shape"),
    ):
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=text):
            SafetensorsFile(path)


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_a_config_error_or_harmless(tmp_path: Path, whole: Path, data: st.DataObject) -> None:
    raw = bytearray((whole / "model.safetensors").read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        with pytest.raises(ConfigError):
            SafetensorsFile(_written(tmp_path, raw))
        return
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        file = SafetensorsFile(_written(tmp_path, raw))
    except ConfigError:
        return
    assert all(tensor.offset + tensor.nbytes <= file.size for tensor in file.tensors.values())


def test_half_types_are_written_as_the_reference_reads_them(tmp_path: Path) -> None:
    from safetensors import safe_open

    values = {"a": np.array([[1.5, -2.25]], dtype=np.float32)}
    write_safetensors(tmp_path / "f16.safetensors", values, "F16")
    with safe_open(tmp_path / "f16.safetensors", "np") as file:
        assert file.get_tensor("a").tolist() == [[1.5, -2.25]]


def _written(directory: Path, data: bytes | bytearray) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    return path
