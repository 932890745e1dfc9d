"""Checking and mapping a directory of safetensors: shards, index, headers, sizes; no tensor is read.

Format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, the data without holes). All faults of a
directory are reported at once in one `ConfigError`. Pickle checkpoints are refused: reading one runs its author's code.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llmd.errors import ConfigError
from llmd.store.gguf import lfs_hint, regular_file_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_HEADER: Final = 64 * 2**20
MAX_JSON: Final = 64 * 2**20

DTYPE_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where one tensor lies; `offset` is from the start of its file."""

    name: str
    shape: tuple[int, ...]
    type: str
    file: Path
    offset: int
    nbytes: int


class SafetensorsFile:
    """One shard's checked header."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file and what is wrong with it."""
        self.path = path
        self.size = regular_file_size(path)
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8 or head.startswith(b"version "):
                raise ConfigError(f"{path}: not a safetensors file{lfs_hint(head + file.read(56))}")
            length = int(struct.unpack("<Q", head)[0])
            if length > self.size - 8:
                raise ConfigError(f"{path}: its header says {length} bytes, the file has {self.size}: it is truncated, damaged or not a safetensors file")
            if length > MAX_HEADER:
                raise ConfigError(f"{path}: its header of {length} bytes is over the limit of {MAX_HEADER}")
            self.header = head + file.read(length)
        self.tensors = self._parse(8 + length)

    def _parse(self, start: int) -> dict[str, SafeTensor]:
        try:
            raw = msgspec.json.decode(self.header[8:], type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.path}: damaged safetensors header: {error}") from None
        found: dict[str, SafeTensor] = {}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            first, last = entry.data_offsets
            if first != end or last - first != self._nbytes(name, entry):
                raise ConfigError(f"{self.path}: damaged safetensors header: tensor {name!r} of shape {entry.shape} says it is at bytes {first} to {last}")
            found[name] = SafeTensor(name, tuple(entry.shape), entry.dtype, self.path, start + first, last - first)
            end = last
        if start + end != self.size:
            what = "truncated" if start + end > self.size else "followed by bytes that belong to no tensor"
            raise ConfigError(f"{self.path}: the file has {self.size} bytes, its header accounts for {start + end}: it is {what}")
        return found

    def _nbytes(self, name: str, entry: _Entry) -> int:
        if entry.dtype not in DTYPE_BYTES:
            raise ConfigError(f"{self.path}: tensor {name!r} has unknown type {entry.dtype!r}")
        size = DTYPE_BYTES[entry.dtype]
        for dim in entry.shape:
            if dim < 0:
                raise ConfigError(f"{self.path}: damaged safetensors header: tensor {name!r} has shape {entry.shape}")
            size *= dim
        return size


class SafetensorsDir:
    """All shards of a checkpoint. `tensors` says where each one lies; `raw` maps it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError with every fault found."""
        self.path = path
        wanted = _weight_map(path)
        names = sorted(set(wanted.values())) if wanted else _shards(path)
        self.shards: list[SafetensorsFile] = []
        faults: list[str] = []
        for name in names:
            try:
                self.shards.append(SafetensorsFile(path / name))
            except ConfigError as error:
                faults += error.faults
        self.tensors: dict[str, SafeTensor] = {}
        by_name = {shard.path.name: shard for shard in self.shards}
        if wanted:
            for tensor, shard in wanted.items():
                if shard not in by_name:
                    continue
                if tensor in by_name[shard].tensors:
                    self.tensors[tensor] = by_name[shard].tensors[tensor]
                else:
                    faults.append(f"{path / shard}: tensor {tensor!r} is named in {INDEX} but is not in this file")
        else:
            for shard_file in self.shards:
                faults += [f"{shard_file.path}: tensor {name!r} is in another file too" for name in shard_file.tensors if name in self.tensors]
                self.tensors.update(shard_file.tensors)
        if faults:
            raise ConfigError(faults)
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def raw(self, tensor: SafeTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes [nbytes], mapped, not copied."""
        import numpy as np

        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, dtype=np.uint8, mode="r")
        return self._maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of reasonable size. Raises ConfigError."""
    if regular_file_size(path) > MAX_JSON:
        raise ConfigError(f"{path}: larger than {MAX_JSON} bytes")
    data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}{lfs_hint(data[:64])}") from None


def _weight_map(path: Path) -> dict[str, str]:
    """tensor -> shard from the index; empty where there is no index."""
    index = path / INDEX
    if not index.exists():
        return {}
    try:
        found = msgspec.convert(read_json(index).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{index}: weight_map: {error}") from None
    if not found:
        raise ConfigError(f"{index}: weight_map is empty")
    for shard in found.values():
        # A name with a separator could make us read files outside the directory.
        if "/" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index}: {shard!r} is not the name of a safetensors file in this directory")
    return found


def _shards(path: Path) -> list[str]:
    """Names of the weight files of a directory without index."""
    if (path / SINGLE).exists():
        return [SINGLE]
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            raise ConfigError(f"{path}: it has only pickle files ({pickles[0]}), which can run code when read; convert the checkpoint to safetensors")
        raise ConfigError(f"{path}: no {SINGLE}, no {INDEX} and no other .safetensors file in it")
    numbered = [re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name) for name in names]
    for match in filter(None, numbered):
        for number in range(1, int(match[3]) + 1):
            other = f"{match[1]}-{number:05}-of-{match[3]}.safetensors"
            if other not in names:
                raise ConfigError(f"{path / other}: the file is missing ({match[0]} says there are {int(match[3])})")
    return names
