"""The GGUF reader gives what the file says, and turns every damage into one clear ConfigError."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmd.errors import ConfigError
from llmd.store import model_config
from llmd.store.gguf import TENSOR_TYPES, GgufFile
from tests.models import VOCAB, gguf_of, random_llama, read_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return gguf_of(random_llama(directory / "hf", layers=1), directory / "tiny.gguf")


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _file(path: Path, *, keys: bytes = b"", key_count: int = 0, tensors: bytes = b"", tensor_count: int = 0, data: bytes = b"", version: int = 3) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + keys + tensors
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_metadata_and_tensors_are_those_of_the_reference_reader(whole: Path) -> None:
    ours, theirs = GgufFile(whole), gguf.GGUFReader(whole)
    assert ours.metadata["general.architecture"] == "llama"
    assert ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert ours.metadata["llama.rope.freq_base"] == 10000.0
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.offset == tensor.data_offset
        assert np.array_equal(ours.raw(mine).reshape(-1), np.asarray(tensor.data).view(np.uint8).reshape(-1))


def test_tensor_types_have_the_sizes_of_the_reference() -> None:
    for number, (name, block, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, size)


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    values = [
        (0, "<B", 200),
        (1, "<b", -5),
        (2, "<H", 60000),
        (3, "<h", -5),
        (4, "<I", 2**31),
        (5, "<i", -7),
        (6, "<f", 0.5),
        (7, "<?", True),
        (10, "<Q", 2**63),
        (11, "<q", -9),
        (12, "<d", 0.1),
    ]
    keys = b"".join(_string(f"k{number}".encode()) + struct.pack("<I", number) + struct.pack(form, value) for number, form, value in values)
    keys += _string(b"list") + struct.pack("<IIQ", 9, 9, 2) + (struct.pack("<IQ", 5, 2) + struct.pack("<ii", 1, -1)) * 2
    found = GgufFile(_file(tmp_path / "f", keys=keys, key_count=len(values) + 1)).metadata
    assert found == {**{f"k{number}": value for number, _, value in values}, "list": [[1, -1], [1, -1]]}


@pytest.mark.parametrize(
    ("keys", "count", "text"),
    [
        (struct.pack("<Q", 2**63), 1, "a metadata key says it is"),
        (_string(b"k") + struct.pack("<IQ", 8, 2**40), 1, "the value of 'k' says it is"),
        (_string(b"k") + struct.pack("<IIQ", 9, 0, 2**62), 1, "'k' says it has"),
        (_string(b"k") + struct.pack("<IIQ", 9, 12, 1000), 1, "needs 8000 bytes"),
        (_string(b"k") + struct.pack("<IIQ", 9, 9, 1) * 1 + struct.pack("<IQ", 9, 1) * 9, 1, "arrays in arrays"),
        (_string(b"k") + struct.pack("<I", 77), 1, "unknown type 77"),
        ((_string(b"k") + struct.pack("<IB", 0, 1)) * 2, 2, "there twice"),
        (_string(b"\xff\xfe") + struct.pack("<IB", 0, 1), 1, "not UTF-8"),
        (_string(b"general.alignment") + struct.pack("<II", 4, 0), 1, "power of two"),
        (_string(b"general.alignment") + struct.pack("<II", 4, 48), 1, "power of two"),
        (b"", 2**60, "metadata keys"),
        (b"", 3, "left"),
    ],
)
def test_damaged_metadata_is_refused(tmp_path: Path, keys: bytes, count: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GgufFile(_file(tmp_path / "f.gguf", keys=keys, key_count=count))


@pytest.mark.parametrize(
    ("tensors", "count", "text"),
    [
        (_tensor(dims=(2**40, 2**40)), 1, "which F32 cannot have"),
        (_tensor(dims=(2**32, 2**32)), 1, "which F32 cannot have"),
        (_tensor(dims=(0,)), 1, "which F32 cannot have"),
        (_tensor(dims=(31,), kind=2), 1, "which Q4_0 cannot have"),
        (_tensor(dims=()), 1, "0 dimensions"),
        (_tensor(kind=999), 1, "unknown type 999"),
        (_tensor(offset=7), 1, "not a multiple of 32"),
        (_tensor(offset=2**63), 1, "truncated or damaged"),
        (_tensor(dims=(64,)), 1, "truncated or damaged"),
        (_tensor() * 2, 2, "there twice"),
        (_tensor() + _tensor(b"u"), 2, "overlap"),
        (b"", 2**50, "tensors"),
    ],
)
def test_damaged_tensor_table_is_refused(tmp_path: Path, tensors: bytes, count: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GgufFile(_file(tmp_path / "f.gguf", tensors=tensors, tensor_count=count, data=b"\0" * 128))


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    for name, data, text in (
        ("empty", b"", "empty"),
        ("short", b"GGU", "the magic number needs 4 bytes"),
        ("text", b"hello there, this is no model", "not a GGUF file"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        ("version", b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=text) as caught:
            GgufFile(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message
    with pytest.raises(ConfigError, match="No such file"):
        GgufFile(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not a regular file"):
        GgufFile(tmp_path)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_refused(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = whole.read_bytes()
    # the last tensor may be followed by padding that nobody needs
    end = max(tensor.offset + tensor.nbytes for tensor in GgufFile(whole).tensors.values())
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(ConfigError):
        GgufFile(path)


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_in_the_header_give_a_config_error_or_a_usable_header(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(whole.read_bytes())
    header = GgufFile(whole).header_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    try:
        file = GgufFile(path)
        model_config.from_gguf(file)
    except ConfigError:
        return
    for tensor in file.tensors.values():
        assert tensor.offset + tensor.nbytes <= file.size
        assert file.raw(tensor).nbytes == tensor.nbytes


def test_configuration_comes_from_the_metadata(whole: Path) -> None:
    config = model_config.from_gguf(GgufFile(whole))
    hf, _ = read_checkpoint(whole.parent / "hf")
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (VOCAB, 64, 1, 4, 2, 16)
    assert config.rms_eps == pytest.approx(hf["rms_norm_eps"])
    assert config.permuted_qk
    assert not config.tie_embeddings
