"""`Ahead`: while nothing runs, the KV pool's memory is taken somewhat ahead of its use, so that a prompt that comes then does not wait for it.

A system gives memory at the first write, and some virtual machines take long for it: their host has to find it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llmd.memory.pools import TokenToKVPoolAllocator

#: How much memory is taken whether it will be needed or not: the prompts of a first burst, and little beside a model.
FIRST_BYTES: Final = 512 << 20
#: And to how much of what has been needed so far: who has had a lot to do will have more.
GROWTH: Final = 1.5
#: How much is taken at once: a request that comes meanwhile waits for it. A large page.
PIECE_BYTES: Final = 2 << 20


class Ahead:
    """Pages are first handed out in the order of their numbers; those behind the highest one so far are free, and their memory may be written to."""

    def __init__(self, pages: TokenToKVPoolAllocator, page_bytes: int, take: Callable[[int, int], None]) -> None:
        """`take`: makes the memory of pages begin..end (exclusive) be there; their contents are lost."""
        self._pages = pages
        self._each = max(1, PIECE_BYTES // page_bytes)
        self._first = max(1, FIRST_BYTES // page_bytes)
        self._take = take
        self._next = 1
        """The first page whose memory has not been taken."""

    def take(self) -> bool:
        """Take one piece, if there is not enough yet; returns whether there is more to take. Only while no step runs."""
        used = self._pages.highest
        end = min(max(self._first, int(used * GROWTH)), self._pages.pages_total) + 1
        begin = max(self._next, used + 1)
        if begin >= end:
            return False
        self._next = min(begin + self._each, end)
        self._take(begin, self._next)
        return self._next < end
