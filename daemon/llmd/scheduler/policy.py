"""The orders of the waiting queue that `scheduler.policy` chooses from, besides fcfs (waiting.py).

`lpm`, longest prefix match: who finds most of its prompt in the prefix tree goes first, among the oldest few. `priority`: the
smaller `priority` first, and it may preempt: a running request of a larger one steps back when there is no slot or memory for it.
Both keep `scheduler.priority_max_wait`: who has waited that long in all goes next, whatever the rest says, and isn't preempted again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from typing import Literal

from llmd.scheduler.req import Req
from llmd.scheduler.waiting import WaitingQueue

#: Waiting requests that lpm compares: more would cost each step more than a better choice saves.
LPM_WINDOW = 128

Policy = Literal["fcfs", "lpm", "priority"]


class LongestPrefixQueue(WaitingQueue):
    """Retracted requests still go first: their clients are waiting in mid-sentence."""

    def __init__(self, known: Callable[[Req], int], max_wait: float) -> None:
        """`known`: pages of a request's prompt that are in the tree."""
        super().__init__()
        self._known = known
        self._max_wait = max_wait

    def head(self, now: float) -> Req | None:
        if self._returned or (oldest := self.oldest_new) is None or now - oldest.queued >= self._max_wait:
            return super().head(now)
        return max(islice(self._new.values(), LPM_WINDOW), key=self._known)  # the first of equals: the oldest


class PriorityQueue(WaitingQueue):
    """Two heaps over the same requests, by priority and by time waited. Entries of requests that have left are dropped when they come up."""

    preempts = True

    def __init__(self, max_wait: float) -> None:
        super().__init__()
        self._max_wait = max_wait
        self._count = 0
        self._entries: dict[str, int] = {}
        """rid -> number of its valid entry in each heap."""
        self._by_priority: list[tuple[tuple[float, int], int, Req]] = []
        self._by_wait: list[tuple[tuple[float, int], int, Req]] = []

    def head(self, now: float) -> Req | None:
        longest = self._top(self._by_wait)
        if longest is not None and longest.waited + now - longest.queued >= self._max_wait:
            return longest
        return self._top(self._by_priority)

    def push(self, req: Req) -> None:
        super().push(req)
        self._enter(req)

    def push_back(self, req: Req) -> None:
        super().push_back(req)
        self._enter(req)

    def pop(self, rid: str) -> Req | None:
        self._entries.pop(rid, None)
        return super().pop(rid)

    def worth(self, req: Req) -> tuple[int, int]:
        return req.source.priority, req.order

    def may_preempt(self, head: Req, running: Req) -> bool:
        """Only for a smaller priority; and nobody is sent back once it has waited for `max_wait` in all."""
        return head.source.priority < running.source.priority and running.waited < self._max_wait

    def _enter(self, req: Req) -> None:
        self._count += 1
        self._entries[req.rid] = self._count
        heapq.heappush(self._by_priority, ((req.source.priority, req.order), self._count, req))
        heapq.heappush(self._by_wait, ((req.queued - req.waited, req.order), self._count, req))

    def _top(self, heap: list[tuple[tuple[float, int], int, Req]]) -> Req | None:
        if len(heap) > 2 * len(self) + 64:  # mostly entries of those that have left
            heap[:] = [entry for entry in heap if self._valid(entry)]
            heapq.heapify(heap)
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _valid(self, entry: tuple[tuple[float, int], int, Req]) -> bool:
        return self._entries.get(entry[2].rid) == entry[1]


def make_queue(policy: Policy, max_wait: float, known: Callable[[Req], int]) -> WaitingQueue:
    """The queue of `scheduler.policy`."""
    if policy == "priority":
        return PriorityQueue(max_wait)
    return LongestPrefixQueue(known, max_wait) if policy == "lpm" else WaitingQueue()
