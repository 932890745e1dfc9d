"""One process at a time: a lock on a file, which the kernel drops with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from llmd.errors import ResourceError

#: Seconds that another pull may take.
DEADLINE: Final = 1860.0


@contextlib.contextmanager
def locked(path: Path, report: Callable[[str], None], *, what: str = "pull of the same model", patience: float = DEADLINE) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which another `what` may hold for `patience` seconds. Raises ResourceError, OSError."""
    deadline = time.monotonic() + patience
    with path.open("ab") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceError(f"{path} is held by another {what} for more than {patience:.0f} s") from None
                if not waiting:
                    report(f"waiting for another {what}")
                waiting = True
                time.sleep(0.1)
        yield
