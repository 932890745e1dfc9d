"""`ReqToTokenPool` and `TokenToKVPoolAllocator`: which rows and KV pages are taken, and where each request's tokens lie.

Owned by the scheduler's one thread. Page 0 and row 0 are nobody's: a runner may pad its batches with them. A KV page is active
(held by a running request), cached, or free, and the three add up to the total at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class AccountingError(RuntimeError):
    """A page or row was freed twice, or is held by two: what the pools say can no longer be trusted."""


class ReqToTokenPool:
    """int32 [max_running_requests + 1, context_length]: the KV slot of each token of each running request."""

    def __init__(self, max_running_requests: int, context_length: int) -> None:
        self.req_to_token: npt.NDArray[np.int32] = np.zeros((max_running_requests + 1, context_length), dtype=np.int32)
        self._free = list(range(max_running_requests, 0, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Rows that may still be taken."""
        return len(self._free)

    @property
    def active(self) -> int:
        """Rows that are taken."""
        return len(self._held)

    def alloc(self) -> int | None:
        """A row, or None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._held.add(row)
        return row

    def free(self, row: int) -> None:
        """Give a row back. Raises AccountingError if it is not taken."""
        if row not in self._held:
            raise AccountingError(f"row {row} is freed but not taken")
        self._held.remove(row)
        self._free.append(row)

    def rebuild(self, held: Iterable[int]) -> None:
        """Forget everything but that `held` are taken."""
        self._held = set(held)
        self._free = [row for row in range(len(self.req_to_token) - 1, 0, -1) if row not in self._held]


class TokenToKVPoolAllocator:
    """Free list of KV pages 1..pages_total; page p holds the token slots p * page_size up to (p + 1) * page_size."""

    def __init__(self, pages_total: int, page_size: int) -> None:
        self.pages_total = pages_total
        self.page_size = page_size
        self._free = list(range(pages_total, 0, -1))
        self._held = bytearray(pages_total + 1)
        self.highest = 0
        """The highest page that was ever taken: nothing has been written behind it."""

    @property
    def num_slots(self) -> int:
        """Token slots that the KV tensors must have, page 0 included."""
        return (self.pages_total + 1) * self.page_size

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pages_active(self) -> int:
        return self.pages_total - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of one request take."""
        return -(-tokens // self.page_size)

    def alloc(self, pages: int) -> list[int] | None:
        """So many pages, or None (and nothing taken) when there are too few."""
        if pages > len(self._free):
            return None
        if pages == 0:
            return []
        taken = self._free[-pages:][::-1]
        del self._free[-pages:]
        for page in taken:
            self._held[page] = 1
        self.highest = max(self.highest, *taken)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises AccountingError, with nothing changed, if one is not taken or comes twice."""
        if len(set(pages)) != len(pages) or not all(0 < page <= self.pages_total and self._held[page] for page in pages):
            raise AccountingError("a KV page is freed that is not taken")
        for page in pages:
            self._held[page] = 0
        self._free.extend(pages)

    def check(self, held: Sequence[int]) -> str | None:
        """None if exactly the pages `held` are taken and the rest is free, once each; else what is wrong."""
        taken = sum(self._held)
        if len(set(held)) != len(held):
            return "a page is held twice"
        if taken + len(self._free) != self.pages_total or len(set(self._free)) != len(self._free) or any(self._held[page] for page in self._free):
            return f"{taken} active and {len(self._free)} free pages of {self.pages_total}"
        if taken != len(held) or not all(self._held[page] for page in held):
            return f"{taken} pages are taken, requests hold {len(held)}"
        return None

    def rebuild(self, held: Sequence[int]) -> None:
        """Forget everything but that `held` are taken."""
        self._held = bytearray(self.pages_total + 1)
        for page in held:
            self._held[page] = 1
        self._free = [page for page in range(self.pages_total, 0, -1) if not self._held[page]]
