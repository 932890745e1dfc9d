"""What a scheduler rank shows of its requests and its prefix tree. Made in the control link's thread while the loop goes on.

So nothing here may change anything, and what is read may be a step old: each container is copied whole, in one go that no other thread
can come between, or left out until the next heartbeat.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import Final, TypeVar

from llmd.memory.radix_cache import TOKEN_BYTES, Node, RadixCache
from llmd.scheduler.loop import Scheduler
from llmd.scheduler.req import Req
from llmd.wire.tables import MAX_REQUESTS, Prefix, ScheduledRequest, Tables

T = TypeVar("T")

#: Prefixes that are shown, and nodes that are looked at for them.
MAX_PREFIXES: Final = 32
MAX_NODES: Final = 20_000
#: Seconds between two walks over a tree that has changed.
WALK_EVERY: Final = 2.0


class SchedulerTables:
    """`tables()` of the link. `scheduler` is set once there is one."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self._secret = secrets.token_bytes(16)
        self._walked_at = 0.0
        self._seen: object = None
        self._prefixes: tuple[list[Prefix], int] = [], 0

    def tables(self) -> Tables:
        """All tables, now."""
        scheduler = self.scheduler
        if scheduler is None:
            return Tables()
        now = time.monotonic()
        running, waiting = _copy(scheduler.decode.running.values()), _copy(scheduler.waiting)
        rows = [_row(req, now) for req in islice((*running, *waiting), MAX_REQUESTS)]
        prefixes, total = self._tree(scheduler.kv.cache, now)
        return Tables(scheduled=rows, requests_total=len(running) + len(waiting), prefixes=prefixes, prefixes_total=total)

    def _tree(self, cache: RadixCache | None, now: float) -> tuple[list[Prefix], int]:
        """The biggest prefixes and how many there are; looked up anew only when the tree has changed."""
        if cache is None:
            return [], 0
        seen = cache.pages_cached, cache.pages_locked, cache.clock
        if seen != self._seen and now - self._walked_at >= WALK_EVERY:
            nodes = _copy(islice(cache.nodes(), MAX_NODES))
            self._seen, self._walked_at = seen, now
            self._prefixes = [self._prefix(node, below) for node, below in _biggest(nodes)], len(nodes)
        return self._prefixes

    def _prefix(self, node: Node, below: int) -> Prefix:
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        name = blake2b(key=self._secret, digest_size=4)
        for part in reversed(path):
            name.update(part.key)
        start = sum(len(part.key) for part in path[1:]) // TOKEN_BYTES
        return Prefix(name.hexdigest(), start, len(node.key) // TOKEN_BYTES, len(node.pages), below, node.hits, node.locks)


def _biggest(nodes: list[Node]) -> list[tuple[Node, int]]:
    """Nodes with the most pages of their own, each with the pages of all that continue it."""
    below: dict[int, int] = {}
    for node in reversed(nodes):  # a parent comes before what continues it
        parent = node.parent
        if parent is not None:
            below[id(parent)] = below.get(id(parent), 0) + len(node.pages) + below.get(id(node), 0)
    return [(node, below.get(id(node), 0)) for node in heapq.nlargest(MAX_PREFIXES, nodes, key=lambda node: len(node.pages))]


def _row(req: Req, now: float) -> ScheduledRequest:
    waits = req.row == 0
    return ScheduledRequest(
        rid=req.rid,
        frontend=req.source.frontend,
        phase="waiting" if waits else "prefill" if req.pending > 1 or not req.output_ids else "decode",
        age_s=round(now - req.arrived, 3),
        waited_s=round(req.waited + (now - req.queued if waits else 0.0), 3),
        prompt_tokens=len(req.source.input_ids),
        cached_tokens=req.cached_tokens,
        output_tokens=len(req.output_ids),
        pages=len(req.pages),
        priority=req.source.priority,
    )


def _copy(values: Iterable[T]) -> list[T]:
    """All values, or none if they change while they are being copied."""
    for _ in range(3):
        try:
            return list(values)
        except RuntimeError:
            continue
    return []
