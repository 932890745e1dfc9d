"""Packed weights in `cache_dir`/packed: made once, taken by every later start, made again when they are damaged or no longer fit.

`load_packed` always succeeds where packing itself does: a cache that cannot be read or written, or a full disk, costs a warning and the time to pack. Nobody
ever sees half a file: it is written beside its name and renamed. Two processes that want the same pack: the second waits for the first
and takes what that made; if waiting is not possible, both make it, and the same bytes replace each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from llmd.errors import ResourceError
from llmd.model.pack_file import Item, Packed, PackError, PackKey, in_memory, read, write
from llmd.store.files import PACK_SUFFIX, PACKED
from llmd.store.locks import locked

log = logging.getLogger(__name__)

DIRECTORY, SUFFIX = PACKED, PACK_SUFFIX
#: (stage, done, total) in bytes
Progress = Callable[[str, int, int], None]

STAGE: Final = "packing weights"
#: Seconds that another start may take to pack; below `supervision.startup_timeout` as shipped.
WAIT_S: Final = 60.0
#: A pack that nobody has used for so long goes when another is made.
KEEP_S: Final = 30 * 24 * 3600.0


def load_packed(cache_dir: Path, key: PackKey, items: Sequence[Item], progress: Progress) -> Packed:
    """The packed `items`: from the cache, made first if they are not there or damaged; in memory where the cache is of no use."""
    path = cache_dir / DIRECTORY / _file_name(key)
    found = _read(path, key, items)
    if found is not None:
        return found
    total = sum(item.nbytes for item in items)

    def report(done: int) -> None:
        progress(STAGE, min(done, total), total)

    report(0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path, lambda: progress("waiting for another start that packs the same weights", 0, 0)):
            # Perhaps somebody else has made it while we waited; what is wrong with it has been said.
            return _read(path, key, items, logging.DEBUG) or _make(path, key, items, report)
    except (OSError, PackError) as error:
        reason = getattr(error, "strerror", None) or error
        log.warning("%s: packed weights cannot be kept (%s): they are packed again at each start, and take memory of their own", path, reason)
    return in_memory(items, report)


def _file_name(key: PackKey) -> str:
    """`WEIGHTS.QUANTIZATION.LAYOUT.HASH.pack`; the hash is of the whole key."""
    digest = hashlib.sha256(msgspec.msgpack.encode(key)).hexdigest()[:12]
    return f"{_group(key)}.{digest}{SUFFIX}"


def _group(key: PackKey) -> str:
    """What packs that replace each other have in common. A layout is `NAME-NUMBER`, and only its newest number is kept."""
    parts = (key.weights_version, key.quantization, key.layout.partition("-")[0])
    return ".".join(re.sub(r"[^\w@+-]", "_", part)[-80:] for part in parts)


def _read(path: Path, key: PackKey, items: Sequence[Item], level: int = logging.WARNING) -> Packed | None:
    try:
        packed = read(path, key, items)
    except FileNotFoundError:
        return None
    except (PackError, OSError, ValueError) as error:
        log.log(level, "%s cannot be used: %s; the weights are packed again", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # `_prune` goes by the time of the last use
    return packed


def _make(path: Path, key: PackKey, items: Sequence[Item], report: Callable[[int], None]) -> Packed:
    """Write the pack and take it in. No fsync: what a power cut leaves half-written fails its checksums at the next start."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by one that was killed; we hold the lock
        left.unlink(missing_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file, key, items, report)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _prune(path, _group(key))
    return read(path, key, items)


def _prune(made: Path, group: str) -> None:
    """Remove what the pack just made replaces, and what has not been used for long. Processes that use one have it in memory."""
    oldest = time.time() - KEEP_S
    for lock in made.parent.glob(f".*{SUFFIX}.lock"):
        with contextlib.suppress(OSError):
            if not lock.with_name(lock.name[1 : -len(".lock")]).exists() and lock.stat().st_mtime < oldest:
                lock.unlink()
    for path in made.parent.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            replaced = path.name.rsplit(".", 2)[0] == group
            if path != made and (replaced or path.stat().st_mtime < oldest):
                path.unlink()
                made.parent.joinpath(_lock_name(path)).unlink(missing_ok=True)


def _lock_name(path: Path) -> str:
    return f".{path.name}.lock"


@contextlib.contextmanager
def _one_at_a_time(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `path` if it can be had; go on without where it cannot (a file system without locks)."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ResourceError, OSError):
            stack.enter_context(locked(path.with_name(_lock_name(path)), lambda line: waiting(), what="start that packs the same weights", patience=WAIT_S))
        yield
