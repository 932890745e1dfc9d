"""Head of RUN/private/step.RANK, the scheduler's journal of the step that runs (llmd.scheduler.journal): what the supervisor reads of it."""

from __future__ import annotations

from struct import Struct
from typing import Final

VERSION: Final = 1
#: Version, epoch, flags, number of entries.
HEAD: Final = Struct("<IIII")
RUNNING: Final = 1
"""Flag: a step runs."""
ALONE: Final = 2
"""Flag: with one request only, which is suspected of having ended engines before."""


def died_alone(head: bytes, epoch: int) -> bool:
    """Whether an engine of `epoch` that is dead was computing one suspect and nothing else."""
    if len(head) < HEAD.size:
        return False
    version, written, flags, _ = HEAD.unpack_from(head)
    return bool(version == VERSION and written == epoch and flags == RUNNING | ALONE)
