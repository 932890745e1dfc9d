"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

#: Directory of `cache_dir` where llmd.model.pack_cache keeps packed weights, and how its files' names end.
PACKED: Final = "packed"
PACK_SUFFIX: Final = ".pack"


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` under a temporary name beside it, then rename. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:64]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
