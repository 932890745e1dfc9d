"""`WaitingQueue`: requests that have arrived and hold no KV, and who of them is next: first come, first served. policy.py has the others."""

from __future__ import annotations

from collections.abc import Iterator

from llmd.scheduler.req import Req


class WaitingQueue:
    """Retracted requests, which have run before, then new ones; both in order of arrival."""

    preempts = False
    """Whether `may_preempt` is ever True."""

    def __init__(self) -> None:
        self._new: dict[str, Req] = {}
        self._returned: dict[str, Req] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._returned)

    def __iter__(self) -> Iterator[Req]:
        yield from self._returned.values()
        yield from self._new.values()

    def __contains__(self, rid: str) -> bool:
        return rid in self._new or rid in self._returned

    def head(self, now: float) -> Req | None:
        """Who is admitted next. `now`: monotonic time."""
        return next(iter(self), None)

    def push(self, req: Req) -> None:
        """A new arrival."""
        self._new[req.rid] = req

    def push_back(self, req: Req) -> None:
        """A retracted request waits again."""
        self._returned[req.rid] = req
        if len(self._returned) > 1:
            self._returned = dict(sorted(self._returned.items(), key=lambda item: item[1].order))

    def pop(self, rid: str) -> Req | None:
        """Take one out, wherever it stands."""
        return self._new.pop(rid, None) or self._returned.pop(rid, None)

    def worth(self, req: Req) -> tuple[int, int]:
        """Who runs on when KV is short: the smallest longest. Here the oldest, so that somebody always gets to the end."""
        return 0, req.order

    def may_preempt(self, head: Req, running: Req) -> bool:
        """Whether `running` has to make way for `head`."""
        return False

    @property
    def oldest_new(self) -> Req | None:
        """Who has waited longest of those that never ran."""
        return next(iter(self._new.values()), None)
