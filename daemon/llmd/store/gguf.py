"""Reading a GGUF file's header and mapping its tensors. Every number in the file is checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A damaged file gives a
`ConfigError` with one sentence; never a crash, a hang or memory beyond a fixed budget. Knows nothing of models.
A header is read without numpy, whose import would be a quarter of what a check at the start takes.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from llmd.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

#: What a header may ask for at most; real ones stay far below.
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 65_536
MAX_ITEMS: Final = 8 * 2**20  # array elements in all; three arrays of a vocabulary of 256 Ki are 0.8 Mi
MAX_TEXT: Final = 128 * 2**20  # bytes of strings in all
MAX_NAME: Final = 512  # bytes of a key or a tensor's name
MAX_DEPTH: Final = 4  # arrays in arrays
MAX_ALIGNMENT: Final = 2**20

#: type number -> (name, elements of a block, bytes of a block), from ggml.h
TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

_U64: Final = struct.Struct("<Q")

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
#: value type number -> code of the scalar for `struct`, and its bytes
_SCALARS: Final = {
    number: (code, struct.calcsize(f"<{code}"))
    for number, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}.items()
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order (the reverse of the file's), so a linear's is (out, in)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    """From the start of the file."""
    nbytes: int


class GgufFile:
    """A checked header and a read-only mapping of the rest. The mapping lives as long as this object or an array from `raw`."""

    def __init__(self, path: Path) -> None:
        """Read the header of `path`. Raises ConfigError."""
        self.path = path
        self.size = regular_file_size(path)
        if self.size == 0:
            raise ConfigError(f"{path}: the file is empty")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(path, self._map, min(self.size, len(self._map)))
        self.version, tensor_count, key_count = reader.preamble()
        self.metadata: dict[str, Any] = reader.metadata(key_count)
        alignment = _alignment(path, self.metadata)
        self.tensors: dict[str, GgufTensor] = reader.tensors(tensor_count, alignment)
        self.header_bytes = reader.at
        """Length of the header, without its padding."""

    def raw(self, tensor: GgufTensor) -> Bytes:
        """The tensor's bytes [rows, bytes of a row], mapped, not copied."""
        import numpy as np

        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        rows = math.prod(tensor.shape[:-1])
        return flat.reshape(rows, tensor.nbytes // rows)

    def header(self) -> bytes:
        """The header's bytes, for hashing."""
        return self._map[: self.header_bytes]


def regular_file_size(path: Path) -> int:
    """Size of a regular, readable file; ConfigError for whatever else `path` is."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{path}: not a regular file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: Permission denied")
    return info.st_size


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value > MAX_ALIGNMENT or value & (value - 1):
        raise ConfigError(f"{path}: general.alignment is {value!r}, it must be a power of two")
    return value


class _Reader:
    """A cursor over the header that cannot leave the file."""

    def __init__(self, path: Path, data: mmap.mmap, end: int) -> None:
        self.path = path
        self.data = data
        self.end = end
        self.at = 0
        self.items_left = MAX_ITEMS
        self.text_left = MAX_TEXT

    def fault(self, text: str) -> ConfigError:
        return ConfigError(f"{self.path}: damaged or unsupported GGUF file: {text} (byte {self.at})")

    def take(self, size: int, what: str) -> bytes:
        if size > self.end - self.at:
            raise self.fault(f"{what} needs {size} bytes where {self.end - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def string(self, what: str, limit: int = MAX_TEXT) -> str:
        size = self.u64(what)
        if size > min(limit, self.text_left):
            raise self.fault(f"{what} says it is {size} bytes long")
        self.text_left -= size
        raw = self.take(size, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def preamble(self) -> tuple[int, int, int]:
        """(version, tensors, metadata keys)"""
        if self.take(4, "the magic number") != MAGIC:
            raise ConfigError(f"{self.path}: not a GGUF file (it does not begin with GGUF){lfs_hint(self.data[:64])}")
        version = self.u32("the version")
        if version not in VERSIONS:
            kind = "a big-endian file" if version and version & 0xFFFF == 0 else f"version {version}"
            raise self.fault(f"{kind}; versions 2 and 3, little-endian, can be read")
        tensors, keys = self.u64("the number of tensors"), self.u64("the number of metadata keys")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise self.fault(f"it says it has {tensors} tensors and {keys} metadata keys")
        return version, tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key", MAX_NAME)
            if key in found:
                raise self.fault(f"metadata key {key!r} is there twice")
            found[key] = self.value(self.u32("a value's type"), key, 0)
        return found

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        return self.scalars(kind, 1, key)[0]

    def array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise self.fault(f"{key!r} has arrays in arrays, more than {MAX_DEPTH} deep")
        kind, count = self.u32(f"{key!r}"), self.u64(f"{key!r}")
        if count > self.items_left:
            raise self.fault(f"{key!r} says it has {count} elements")
        self.items_left -= count
        if kind in _SCALARS:
            return self.scalars(kind, count, key)
        if kind == _STRING:
            return self.strings(count, key)
        return [self.value(kind, key, depth) for _ in range(count)]

    def strings(self, count: int, key: str) -> list[str]:
        """As `string` again and again, in one loop: a vocabulary is most of a header, and is read at each start."""
        data, at, end, left = self.data, self.at, self.end, self.text_left
        found = []
        try:
            for _ in range(count):
                (size,) = _U64.unpack_from(data, at)
                at += 8
                left -= size
                if left < 0 or size > end - at:
                    self.at = at
                    raise self.fault(f"a string of {key!r} says it is {size} bytes long")
                found.append(data[at : at + size].decode())
                at += size
        except struct.error:
            self.at = at
            raise self.fault(f"{key!r} needs more bytes than are left") from None
        except UnicodeDecodeError:
            self.at = at
            raise self.fault(f"a string of {key!r} is not UTF-8") from None
        self.at, self.text_left = at, left
        return found

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self.fault(f"{key!r} has a value of unknown type {kind}")
        code, size = _SCALARS[kind]
        raw = self.take(count * size, f"the value of {key!r}")
        if kind == _BOOL:
            return [byte != 0 for byte in raw]
        return list(struct.unpack(f"<{count}{code}", raw))

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        infos = [self.tensor_info(alignment) for _ in range(count)]
        start = -(-self.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset, nbytes in infos:
            if name in found:
                raise self.fault(f"tensor {name!r} is there twice")
            if start + offset + nbytes > self.end:
                end = start + offset + nbytes
                raise ConfigError(f"{self.path}: tensor {name!r} ends at byte {end}, the file at {self.end}: the file is truncated or damaged")
            found[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        ordered = sorted(found.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise self.fault(f"tensors {before.name!r} and {after.name!r} overlap")
        end = max((tensor.offset + tensor.nbytes for tensor in ordered), default=start)
        if self.end - end >= alignment:
            raise ConfigError(f"{self.path}: the tensors end at byte {end}, the file at {self.end}: it is followed by bytes that belong to no tensor")
        return found

    def tensor_info(self, alignment: int) -> tuple[str, tuple[int, ...], str, int, int]:
        """(name, shape, type, offset in the data part, bytes)"""
        name = self.string("a tensor's name", MAX_NAME)
        dims = self.u32(f"tensor {name!r}")
        if not 1 <= dims <= 4:
            raise self.fault(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self.u64(f"tensor {name!r}") for _ in range(dims))[::-1]
        number, offset = self.u32(f"tensor {name!r}"), self.u64(f"tensor {name!r}")
        if number not in TENSOR_TYPES:
            raise self.fault(f"tensor {name!r} has unknown type {number}")
        kind, block, block_bytes = TENSOR_TYPES[number]
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0 or elements > 2**48 or shape[-1] % block:
            raise self.fault(f"tensor {name!r} has shape {list(shape)}, which {kind} cannot have")
        if offset % alignment:
            raise self.fault(f"tensor {name!r} begins at {offset}, not a multiple of {alignment}")
        return name, shape, kind, offset, elements // block * block_bytes


def lfs_hint(head: bytes) -> str:
    """What to add to a message about a file that begins with `head`, where it is a Git LFS pointer."""
    return ": it is a Git LFS pointer, the file itself was not downloaded (git lfs pull)" if head.startswith(b"version https://git-lfs") else ""
