"""`Journal`: which requests the step that runs works on, in a mapped file, so that it can be read after a death that left no time for words.

RUN/private/step.RANK: a head (struct `_HEAD`), then one entry a request. Written before each step, at the cost of a memory copy;
the kernel keeps it when the process dies. Read by the next scheduler (llmd.scheduler.suspects), its head by the supervisor too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

from msgspec import Struct as Record

from llmd.plan.journal import ALONE, HEAD, RUNNING, VERSION
from llmd.scheduler.req import Req

#: A request's mark, and how many tokens of its sequence have their KV when the step is over.
_ENTRY = Struct("<16sQ")


class Last(Record, frozen=True):
    """What the process that died was doing."""

    alone: bool
    """One suspect, and nobody else."""
    requests: dict[bytes, int]
    """mark -> tokens computed when the step would have been over."""


def read(path: Path, epoch: int) -> Last | None:
    """The step in which the scheduler before that of `epoch` died; None where it was in none. Never raises: a damaged file says nothing."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < HEAD.size:
        return None
    version, written, flags, count = HEAD.unpack_from(data)
    if version != VERSION or written + 1 != epoch or not flags & RUNNING or len(data) < HEAD.size + count * _ENTRY.size:
        return None
    entries = _ENTRY.iter_unpack(data[HEAD.size : HEAD.size + count * _ENTRY.size])
    return Last(bool(flags & ALONE), dict(entries))


class Journal:
    """Of one scheduler. `capacity`: requests of two steps at most, since one may be launched while another computes."""

    def __init__(self, path: Path, epoch: int, capacity: int) -> None:
        self._epoch = epoch
        self._size = HEAD.size + capacity * _ENTRY.size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self._size)
            self._map = mmap.mmap(descriptor, self._size)
        finally:
            os.close(descriptor)
        self.end()

    def begin(self, work: Sequence[tuple[Req, int]], *, alone: bool) -> None:
        """A step with these requests begins; each with the tokens that are computed when it is over."""
        pack = _ENTRY.pack
        entries = b"".join([pack(req.mark, tokens) for req, tokens in work])[: self._size - HEAD.size]
        self.end()
        self._map[HEAD.size : HEAD.size + len(entries)] = entries
        HEAD.pack_into(self._map, 0, VERSION, self._epoch, RUNNING | (ALONE if alone else 0), len(entries) // _ENTRY.size)

    def end(self) -> None:
        """No step runs."""
        HEAD.pack_into(self._map, 0, VERSION, self._epoch, 0, 0)

    def close(self) -> None:
        """The file stays, and says that no step runs."""
        self.end()
        self._map.close()
