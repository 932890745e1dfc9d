"""One puller at a time: a lock on a file, which the kernel drops with its holder."""

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
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`. Raises ResourceError."""
    deadline = time.monotonic() + DEADLINE
    with path.open("ab") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceError(f"{path} is held by another pull for more than {DEADLINE:.0f} s") from None
                if not waiting:
                    report("waiting for another pull of the same model")
                waiting = True
                time.sleep(0.1)
        yield
