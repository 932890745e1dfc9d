"""`Source`: the checked files of one model, GGUF or safetensors, behind one face. numpy only: both loaders read through it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from llmd import failpoints
from llmd.errors import ConfigError
from llmd.plan.spec import ModelFiles
from llmd.store import model_config
from llmd.store.gguf import GgufFile
from llmd.store.model_config import ModelConfig
from llmd.store.parameters import Parameter, StoredTensor, parameter_faults
from llmd.store.quant import dequantize
from llmd.store.safetensors_dir import SafetensorsDir, read_json

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: The factors on rotary frequencies that a GGUF file may bring.
ROPE_FACTORS: Final = "rope_freqs.weight"


class Source(Protocol):
    """Checked files of one of the two formats. Arrays are views of a mapping wherever they can be."""

    path: Path
    config: ModelConfig
    files: tuple[Path, ...]
    """Everything that holds weights."""

    def name(self, parameter: Parameter) -> str:
        """What `parameter` is called in these files."""
        ...

    def tensors(self) -> dict[str, StoredTensor]: ...

    def raw(self, name: str) -> Bytes:
        """The stored bytes of tensor `name` [rows, bytes of a row]; one row for a vector."""
        ...


class GgufSource:
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[Path, ...] = (path,)
        self._file = GgufFile(path)
        self.config = model_config.from_gguf(self._file)
        failpoints.hit("loader.shard", str(path))

    def name(self, parameter: Parameter) -> str:
        return parameter.gguf

    def tensors(self) -> dict[str, StoredTensor]:
        return {**self._file.tensors}

    def raw(self, name: str) -> Bytes:
        return self._file.raw(self._file.tensors[name])


class SafetensorsSource:
    """A directory of safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dir = SafetensorsDir(path)
        self.files = tuple(shard.path for shard in self._dir.shards)
        self.config = model_config.from_hf(read_json(path / "config.json"), str(path / "config.json"))
        for file in self.files:
            failpoints.hit("loader.shard", str(file))

    def name(self, parameter: Parameter) -> str:
        return parameter.hf

    def tensors(self) -> dict[str, StoredTensor]:
        return {**self._dir.tensors}

    def raw(self, name: str) -> Bytes:
        tensor = self._dir.tensors[name]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return self._dir.raw(tensor).reshape(rows, -1)


def open_source(files: ModelFiles) -> Source:
    """The files that the checking child has found. Raises ConfigError where they are not, or no longer, what they should be."""
    source: Source
    match files.kind:
        case "gguf":
            source = GgufSource(Path(files.path))
        case "safetensors":
            source = SafetensorsSource(Path(files.path))
        case _:
            raise ConfigError(f"model kind {files.kind!r} has no weights to load")
    faults = parameter_faults(source.config, source.tensors(), str(source.path), gguf=isinstance(source, GgufSource))
    if faults:
        raise ConfigError(faults)
    return source


def floats(source: Source, name: str) -> Floats:
    """Tensor `name` as float32, in its shape."""
    tensor = source.tensors()[name]
    return dequantize(source.raw(name), tensor.type).reshape(tensor.shape)


def rope_factors(source: Source) -> Floats | None:
    """Divisors of the rotary frequencies [head_dim / 2], where the file brings some."""
    return floats(source, ROPE_FACTORS) if isinstance(source, GgufSource) and ROPE_FACTORS in source.tensors() else None
