"""The file of one model's packed weights: tensors one behind the other, each with its checksum, and a table of them at the end.

    tensors     each at a multiple of ALIGN
    table       msgpack of `Table`
    footer      length of the table (u64), CRC-32 of the table (u32), MAGIC

What is damaged or belongs to something else is never used: `read` says why, and the caller packs again. The checksums find damage, not
malice: whoever may write into the cache may write the weights themselves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

MAGIC: Final = b"LLMDPK01"
#: A cache line; the mapping itself begins on a page.
ALIGN: Final = 64
_FOOTER: Final = struct.Struct("<QI8s")
_MAX_TABLE: Final = 64 * 2**20
_THREADS: Final = 4
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class PackError(Exception):
    """Why a file cannot be used."""


class PackKey(Struct, frozen=True):
    """What packed bytes depend on. Two equal keys stand for equal bytes."""

    weights_version: str
    quantization: str
    """What is done to the weights on the way, as the loader names it."""
    layout: str
    """Of the kernels: the library's layout and the instruction set it packs for."""
    sources: tuple[tuple[str, int, int, int], ...]
    """(name, size, mtime_ns, ctime_ns) of each file of weights: the version above knows only their headers."""


class Item(Struct, frozen=True):
    """One tensor to be packed: `make` fills the array [nbytes] that it is given."""

    name: str
    nbytes: int
    make: Callable[[Bytes], None]


class Entry(Struct, frozen=True, array_like=True):
    """Where one tensor lies."""

    name: str
    offset: int
    nbytes: int
    crc: int


class Table(Struct, frozen=True):
    """All that is in a file."""

    key: PackKey
    entries: tuple[Entry, ...]


class Packed(Struct, frozen=True):
    """Packed tensors by name, each a view of the memory behind them. They live as long as the views do."""

    tensors: dict[str, Bytes]
    nbytes: int
    path: Path | None
    """The file they came from; None: they were packed for this process alone."""


def source_facts(files: Sequence[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """`PackKey.sources` of files that are there."""
    facts = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in facts)


def read(path: Path, key: PackKey, items: Sequence[Item]) -> Packed:
    """Take in `path` and check every byte of it. Raises PackError, and FileNotFoundError or another OSError.

    Into huge pages where the machine has them: a step reads all weights, and from a mapping of the file, in small pages, it takes a third longer.
    """
    # A FIFO in its place must not keep the start waiting for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PackError("it is not a file")
        size = found.st_size
        if size < _FOOTER.size:
            raise PackError("it is too short")
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        data = np.frombuffer(mapping, dtype=np.uint8)
        table = _checked_table(data, key, items)
        if has_huge_pages():
            data = np.frombuffer(private_memory(size), dtype=np.uint8)
            _for_each(table.entries, lambda entry: _fill(file.fileno(), data[entry.offset : entry.offset + entry.nbytes], entry.offset))
            data.flags.writeable = False
    tensors = {entry.name: data[entry.offset : entry.offset + entry.nbytes] for entry in table.entries}
    for entry, crc in zip(table.entries, _for_each(table.entries, lambda entry: zlib.crc32(tensors[entry.name].data)), strict=True):
        if crc != entry.crc:
            raise PackError(f"the checksum of {entry.name} is wrong")
    return Packed(tensors, sum(entry.nbytes for entry in table.entries), path)


def write(file: BinaryIO, key: PackKey, items: Sequence[Item], progress: Callable[[int], None]) -> None:
    """Pack `items` into `file`, which is empty. `progress` gets the bytes written so far. Raises OSError.

    Each tensor is made in memory and then written: a store into a mapped file would end the process where the disk is full.
    """
    entries: list[Entry] = []
    at = 0
    buffer = aligned(max((item.nbytes for item in items), default=0))
    for item in items:
        part = buffer[: item.nbytes]
        part[:] = 0
        item.make(part)
        entries.append(Entry(item.name, at, item.nbytes, zlib.crc32(part.data)))
        file.write(part.data)
        at += item.nbytes
        at += file.write(bytes(-at % ALIGN))
        progress(at)
    table = msgspec.msgpack.encode(Table(key, tuple(entries)))
    file.write(table + _FOOTER.pack(len(table), zlib.crc32(table), MAGIC))
    file.flush()


def in_memory(items: Sequence[Item], progress: Callable[[int], None]) -> Packed:
    """Pack `items` into anonymous memory."""
    offsets, total = [], 0
    for item in items:
        offsets.append(total)
        total += item.nbytes + -item.nbytes % ALIGN
    data = np.frombuffer(private_memory(max(1, total)), dtype=np.uint8)
    tensors: dict[str, Bytes] = {}
    for item, offset in zip(items, offsets, strict=True):
        tensors[item.name] = data[offset : offset + item.nbytes]
        item.make(tensors[item.name])
        progress(offset + item.nbytes)
    return Packed(tensors, sum(item.nbytes for item in items), None)


def private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed memory that is taken when it is touched, in huge pages where the machine has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared gets no huge pages
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def has_huge_pages() -> bool:
    """Whether `private_memory` gets huge pages."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def aligned(nbytes: int) -> Bytes:
    """Uninitialised bytes that begin at a multiple of ALIGN."""
    raw = np.empty(nbytes + ALIGN, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def _checked_table(data: Bytes, key: PackKey, items: Sequence[Item]) -> Table:
    table = _table(data)
    if table.key != key:
        raise PackError("it belongs to other weights or kernels")
    if [(entry.name, entry.nbytes) for entry in table.entries] != [(item.name, item.nbytes) for item in items]:
        raise PackError("it holds other tensors")
    return table


def _for_each(entries: Sequence[Entry], work: Callable[[Entry], T]) -> list[T]:
    """`work` on all entries, by a few threads: reading and checksums go on without the interpreter."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, entries))


def _fill(file: int, out: Bytes, offset: int) -> None:
    """Read exactly `out` from `offset` on."""
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done:].data], offset + done)
        if count == 0:
            raise PackError("it has become shorter")
        done += count


def _table(data: Bytes) -> Table:
    length, crc, magic = _FOOTER.unpack(data[-_FOOTER.size :].tobytes())
    end = len(data) - _FOOTER.size
    if magic != MAGIC or length > min(end, _MAX_TABLE):
        raise PackError("its end is missing or of another kind")
    raw = data[end - length : end].tobytes()
    if zlib.crc32(raw) != crc:
        raise PackError("the checksum of its table is wrong")
    try:
        table = msgspec.msgpack.decode(raw, type=Table)
    except msgspec.MsgspecError:
        raise PackError("its table is of another kind") from None
    if any(entry.offset % ALIGN or not 0 <= entry.offset <= entry.offset + entry.nbytes <= end - length for entry in table.entries):
        raise PackError("its table points outside of it")
    return table
