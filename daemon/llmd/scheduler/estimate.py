"""`NewTokenRatio`: what share of the output that requests may generate is expected of them, for admission.

Requests seldom use all their `max_new_tokens`; to keep room for all of it would leave memory idle, to keep none would end in
retraction. As in SGLang's scheduler: the share sinks step by step while all goes well, and after a retraction it starts
again from what the running requests have really used.
"""

from __future__ import annotations

from collections.abc import Collection

from llmd.scheduler.req import Req

INITIAL = 0.7
LEAST = 0.1
#: Decode steps from INITIAL down to LEAST.
DECAY_STEPS = 600
#: Tokens that nobody is expected to go beyond, whatever is allowed.
MOST_TOKENS = 4096
#: Tokens that each request that is left after a retraction shall get further at least.
RETRACTED_STEPS = 20


class NewTokenRatio:
    """Between LEAST and 1."""

    def __init__(self, initial: float = INITIAL) -> None:
        self.value = initial
        self._initial = initial

    def expected_tokens(self, req: Req) -> int:
        """Tokens that `req` is expected to generate still: at least one, if it may."""
        remaining = max(0, req.remaining)
        return min(remaining, max(1, int(min(remaining, MOST_TOKENS) * self.value)))

    def decoded(self) -> None:
        """A decode step went well."""
        self.value = max(min(LEAST, self._initial), self.value - (INITIAL - LEAST) / DECAY_STEPS)

    def retracted(self, running: Collection[Req]) -> None:
        """Not all of them fitted; `running` are left."""
        used = sum(len(req.output_ids) for req in running) + RETRACTED_STEPS * len(running)
        allowed = sum(min(req.source.sampling.max_new_tokens, MOST_TOKENS) for req in running)
        self.value = min(1.0, max(self.value, used / (allowed + 1)))

    def idle(self) -> None:
        """Nothing runs: what was learned is of the past."""
        self.value = self._initial
