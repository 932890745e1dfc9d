"""`llmd models`: what lies in the cache, how large it is, what it can be loaded as; and what can be pulled."""

from __future__ import annotations

import tempfile
from pathlib import Path

from msgspec import Struct

from llmd.config.server_args import ModelArgs
from llmd.errors import LlmdError
from llmd.plan.spec import ModelFiles
from llmd.store import catalog
from llmd.store.files import PACK_SUFFIX, PACKED
from llmd.store.model_files import model_files


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One line."""

    name: str
    """What model.path is to be: a name, or a path."""
    size: int
    """Bytes on disk; of what would be fetched where it is not here."""
    path: str | None
    """None: not pulled yet."""
    loads_as: str
    """What is in it and the types it can be loaded as; or why it cannot be."""


def list_models(cache_dir: Path) -> list[ModelEntry]:
    """Models that llmd knows by name, then whatever else has been pulled into the cache."""
    entries = [_known(entry, cache_dir) for entry in catalog.CATALOG.values()]
    directory = cache_dir / "models"
    others = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    return entries + [_found(path, cache_dir) for path in others if path.name not in catalog.CATALOG and not path.name.startswith(".")]


def packed_note(cache_dir: Path) -> str:
    """One line about the packed weights that lie in the cache; empty where there are none."""
    directory = cache_dir / PACKED
    sizes = [file.stat().st_size for file in directory.glob(f"*{PACK_SUFFIX}")] if directory.is_dir() else []
    if not sizes:
        return ""
    return f"packed weights: {sum(sizes) / 2**20:.0f} MiB in {directory}, of {len(sizes)} models or settings; what is deleted there is made again when needed\n"


def table(entries: list[ModelEntry]) -> str:
    """The entries in columns."""
    rows = [("NAME", "SIZE", "LOADS AS", "WHERE")]
    rows += [(entry.name, f"{entry.size / 2**20:.0f} MiB", entry.loads_as, entry.path or "(not pulled)") for entry in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def _known(entry: catalog.Embedded, cache_dir: Path) -> ModelEntry:
    path = catalog.model_dir(entry.name, cache_dir) / entry.file
    if not path.exists():
        return ModelEntry(name=entry.name, size=entry.size, path=None, loads_as=entry.text)
    return ModelEntry(name=entry.name, size=path.stat().st_size, path=str(path), loads_as=_loads_as(entry.name, cache_dir))


def _found(path: Path, cache_dir: Path) -> ModelEntry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return ModelEntry(name=str(path), size=size, path=str(path), loads_as=_loads_as(str(path), cache_dir))


def _loads_as(path: str, cache_dir: Path) -> str:
    try:
        with tempfile.TemporaryDirectory(prefix="llmd-models-") as place:  # a look at a model leaves nothing behind
            files = model_files(ModelArgs(path=path), cache_dir, [Path(place)])
    except LlmdError as error:
        return f"cannot be loaded: {error.message.partition(chr(10))[0]}"
    return f"{files.architecture} {files.quantization}, {files.parameters / 1e6:.0f} M parameters, context {files.context_length}: {_types(files)}"


def _types(files: ModelFiles) -> str:
    return "float32, bfloat16, float16" + ("" if files.quantization in ("float32", "bfloat16", "float16") else " (dequantized)")
