"""`Isolation`: keeps the journal of steps, and lets suspects run alone (see suspects.py for who that is and why)."""

from __future__ import annotations

from collections.abc import Callable

from llmd.scheduler.decode import DecodeManager
from llmd.scheduler.journal import Journal
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.scheduler.suspects import Suspects
from llmd.scheduler.waiting import WaitingQueue


class Isolation:
    """Used by the scheduler's loop, around each step."""

    def __init__(self, suspects: Suspects, journal: Journal | None, decode: DecodeManager, waiting: WaitingQueue) -> None:
        self.suspects = suspects
        self._journal = journal
        self._decode = decode
        self._waiting = waiting

    def suspect(self) -> Req | None:
        """Who has to run alone now, if anybody."""
        if not self.suspects.any:
            return None
        return next((req for req in (*self._decode.running.values(), *self._waiting) if self.suspects.suspected(req)), None)

    def clear_the_way(self, suspect: Req, fits: Callable[[Req], bool]) -> None:
        """Who else runs keeps its KV meanwhile, unless `suspect` has no room then: the least worthy step back until it has."""
        others = sorted((req for req in self._decode.running.values() if req is not suspect), key=self._waiting.worth)
        while others and not fits(suspect):
            self._decode.retract(others.pop())

    def begin(self, batch: ScheduleBatch, launched: ScheduleBatch | None) -> None:
        """A step begins, while another may be on its way."""
        if self._journal is None:
            return
        work = [(req, req.computed + count) for req, count in zip(batch.reqs, batch.extend_lens, strict=True)]
        if launched is not None:
            known = {req.mark for req in batch.reqs}
            work += [(req, req.computed) for req in launched.reqs if req.mark not in known]
        alone = len(work) == 1 and self.suspects.any and self.suspects.suspected(work[0][0])
        self._journal.begin(work, alone=alone)

    def end(self) -> None:
        """No step runs."""
        if self._journal is not None:
            self._journal.end()

    def got_on(self, batch: ScheduleBatch) -> None:
        """The step is over, and what it computed is there."""
        if self.suspects.any:
            for req in batch.reqs:
                self.suspects.got_on(req)
            self.suspects.save()

    def failed(self, batch: ScheduleBatch) -> None:
        """A step of several has failed, by the fault of one of them, perhaps: each runs alone now, from its beginning.

        What another step on its way brings of them is void: it went on from tokens that there are not.
        """
        for req in batch.reqs:
            if req.done:
                continue
            self.suspects.accuse(req, req.length - req.unseen)
            if req.rid in self._decode.running:
                self._decode.retract(req, keep=False, for_memory=False)
            req.void = req.stay
        self.suspects.save()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
