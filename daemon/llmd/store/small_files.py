"""The small files of a model (tokenizer.json, config.json, chat template), so that frontend and detokenizer never open the big one.

They lie in CACHE/small/NAME@DIGEST, where the digest covers all they were made from: another tokenizer is another directory, and an
existing directory never changes. Each is made under a temporary name and renamed; manifest.json holds sizes and hashes, checked at each use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from llmd.errors import ResourceError

MANIFEST: Final = "manifest.json"
#: Part of the digest; raise it when the same sources give other files.
FORMAT: Final = 1

Files = dict[str, bytes]


class _Entry(Struct, frozen=True):
    size: int
    sha256: str


class _Manifest(Struct, frozen=True):
    weights_version: str
    files: dict[str, _Entry]


def small_dir(cache_dir: Path, name: str, weights_version: str, sources: Files) -> Path:
    """The directory for these sources. The name in it is only for people: cut, and without odd characters."""
    digest = hashlib.sha256(f"{FORMAT}\n{weights_version}\n".encode())
    for key in sorted(sources):
        digest.update(f"{key}\n{hashlib.sha256(sources[key]).hexdigest()}\n".encode())
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:64] or "model"
    return cache_dir / "small" / f"{readable}@{digest.hexdigest()[:16]}"


def install(target: Path, weights_version: str, make: Callable[[], Files]) -> None:
    """See to it that `target` is whole; `make` gives its files if it is not. Several processes may do so at once.

    Raises ResourceError where the cache cannot be written.
    """
    if is_whole(target):
        return
    files = make()
    entries = {name: _Entry(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    manifest = json.dumps(msgspec.to_builtins(_Manifest(weights_version, entries)), indent=1).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        try:
            for name, data in {**files, MANIFEST: manifest}.items():
                (work / name).write_bytes(data)
            os.chmod(work, 0o755)
            _publish(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ResourceError(f"cannot write {target}: {error.strerror or error}", hint="set cache_dir to a directory that can be written") from None


def install_first(cached: Path, targets: Sequence[Path], weights_version: str, make: Callable[[], Files]) -> Path:
    """`cached` if it is whole, else the first of `targets` that can be written, whole. Raises ResourceError where none can."""
    if is_whole(cached):
        return cached
    for target in targets[:-1]:
        with contextlib.suppress(ResourceError):
            install(target, weights_version, make)
            return target
    install(targets[-1], weights_version, make)
    return targets[-1]


def is_whole(target: Path) -> bool:
    """Whether every file of the manifest is there with its size and hash."""
    try:
        manifest = msgspec.json.decode((target / MANIFEST).read_bytes(), type=_Manifest)
        for name, entry in manifest.files.items():
            data = (target / name).read_bytes()
            if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
                return False
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def _publish(work: Path, target: Path) -> None:
    """Rename `work` to `target`; a whole one that another process put there first is kept, a damaged one is moved away."""
    for _ in range(3):
        with contextlib.suppress(OSError):
            os.rename(work, target)
            return
        if is_whole(target):
            return
        aside = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent))
        with contextlib.suppress(OSError):
            os.rename(target, aside / "small")
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(work, target)
