"""What a worker knows of itself, and the names that supervisor and worker must agree on."""

from __future__ import annotations

import signal

from msgspec import Struct

from llmd.plan.spec import Boot, ProcessSpec, Role

#: Environment set by the supervisor at each start of a child.
ENV_INCARNATION = "LLMD_INCARNATION"
ENV_EPOCH = "LLMD_EPOCH"
ENV_PARENT = "LLMD_SUPERVISOR_PID"
ENV_CRASHED = "LLMD_CRASHED"
"""1 where the incarnation before this one ended by itself, not because it was asked to."""

#: Python stacks of all threads go to stderr on this signal; sent before a hung process is killed.
STACKS_SIGNAL = signal.SIGUSR1


class WorkerContext(Struct, frozen=True):
    """One worker's place in the plan."""

    boot: Boot
    role: Role
    rank: int
    incarnation: int
    """1 for the first start of this process."""
    epoch: int
    """The engine's epoch when this process was started (a scheduler's own)."""
    crashed: bool = False
    """The incarnation before this one ended by itself, not because it was asked to."""

    @property
    def spec(self) -> ProcessSpec:
        return next(p for p in self.boot.processes if (p.role, p.rank) == (self.role, self.rank))
