"""`WaitingQueue`: requests that have arrived and hold no KV, in the order in which they will be admitted (first come, first served)."""

from __future__ import annotations

from collections.abc import Iterator

from llmd.scheduler.req import Req


class WaitingQueue:
    """Ordered by arrival. A retracted request is older than all that never ran, so it comes back to the front."""

    def __init__(self) -> None:
        self._reqs: dict[str, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, rid: str) -> bool:
        return rid in self._reqs

    @property
    def head(self) -> Req | None:
        """Who is admitted next."""
        return next(iter(self._reqs.values()), None)

    def push(self, req: Req) -> None:
        """A new arrival."""
        self._reqs[req.rid] = req

    def return_to_front(self, req: Req) -> None:
        """A retracted request is next again."""
        self._reqs = {req.rid: req, **self._reqs}

    def pop(self, rid: str) -> Req | None:
        """Take one out, wherever it stands."""
        return self._reqs.pop(rid, None)

    @property
    def oldest_new(self) -> Req | None:
        """Who has waited longest of those that never ran."""
        return next((req for req in self._reqs.values() if req.started is None), None)
