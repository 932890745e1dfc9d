"""`KvManager`: gives rows and pages to requests and takes them back. The only code that touches the pools and the prefix tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from llmd.memory.pools import ReqToTokenPool, TokenToKVPoolAllocator
from llmd.memory.radix_cache import TOKEN_BYTES, Namespace, RadixCache
from llmd.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Every page is one of these."""

    free: int
    active: int
    """Held by requests, or on a path of the tree that one of them uses."""
    cached: int
    """In the tree and used by nobody: given up when pages are needed."""


class KvManager:
    """A request's row lists the KV slot of each of its tokens; its pages cover at least the tokens that a step computes.

    The first `req.shared` of them are the tree's, kept by a lock on `req.node`; the rest is the request's own. What a request has
    computed becomes the tree's after each part of its prompt, and when it ends or steps back.
    """

    def __init__(self, rows: ReqToTokenPool, pages: TokenToKVPoolAllocator, cache: RadixCache | None = None, weights_version: str = "") -> None:
        """Without `cache` nothing is shared and nothing outlives its request."""
        self.rows = rows
        self.pages = pages
        self.cache = cache
        self.weights_version = weights_version
        self._offsets = np.arange(pages.page_size, dtype=np.int32)
        self._page_bytes = pages.page_size * TOKEN_BYTES

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pages.pages_total * self.pages.page_size

    @property
    def pages_available(self) -> int:
        """Pages that can be had without taking any from a request."""
        return self.pages.pages_free + (self.cache.pages_cached if self.cache else 0)

    @property
    def counts(self) -> PageCounts:
        """May be asked by another thread, which may see a page under way as active, but always each page once."""
        free = self.pages.pages_free
        cached = min(self.cache.pages_cached if self.cache else 0, self.pages.pages_total - free)
        return PageCounts(free, self.pages.pages_total - free - cached, cached)

    # ------------------------------------------------------------ before a request runs

    def known_pages(self, req: Req) -> tuple[int, int]:
        """(pages of a waiting request's sequence that are known, how many of these nobody uses now)."""
        return self.cache.peek(self._namespace(req), self._reusable(req)) if self.cache else (0, 0)

    def reuse(self, req: Req) -> None:
        """Give a request that holds nothing a row, and the pages that are known of its sequence."""
        row = self.rows.alloc()
        if row is None:
            raise RuntimeError("a request is admitted without a free row")
        req.row = row
        if self.cache is None:
            return
        known = self.cache.match(self._namespace(req), self._reusable(req))
        self.cache.lock(known.node)
        req.node, req.shared, req.computed = known.node, len(known.pages), len(known.pages) * self.pages.page_size
        req.settled = req.computed
        self._append(req, known.pages)

    # ------------------------------------------------------------ while it runs

    def missing_pages(self, req: Req, tokens: int) -> int:
        """Pages still to be taken before `tokens` tokens of `req` have room."""
        return max(0, self.pages.pages_for(tokens) - len(req.pages))

    def grow(self, req: Req, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of a request that has its row; False, with nothing taken, when there are too few pages."""
        missing = self.missing_pages(req, tokens)
        if not missing:
            return True
        short = missing - self.pages.pages_free
        if short > 0:
            if self.cache is None or self.cache.pages_cached < short:
                return False
            self.pages.free(self.cache.evict(short))
        taken = self.pages.alloc(missing)
        if taken is None:
            return False
        self._append(req, taken)
        return True

    def share(self, req: Req) -> None:
        """Make the whole pages that `req` has computed known to others. Where another was first, its page takes the place of ours."""
        if self.cache is None:
            return
        count = req.settled // self.pages.page_size
        if count <= req.shared:
            return
        known = self.cache.insert(self._namespace(req), req.key(count * self.pages.page_size), req.pages[:count])
        self.cache.lock(known.node)
        if req.node is not None:
            self.cache.unlock(req.node)
        mine, theirs = req.pages[req.shared : len(known.pages)], known.pages[req.shared :]
        if mine:
            self._place(req, req.shared, theirs)
            req.pages[req.shared : len(known.pages)] = theirs
            self.pages.free(mine)  # only now, when no page table points at them any more
        req.node, req.shared = known.node, count

    # ------------------------------------------------------------ when it ends or steps back

    def release(self, req: Req, *, keep: bool = True) -> None:
        """Take everything back. What was computed stays known, unless `keep` is False: then nobody may use it again."""
        if keep:
            self.share(req)
        own, node, row = req.pages[req.shared :], req.node, req.row
        req.pages, req.node, req.shared, req.row, req.computed, req.settled = [], None, 0, 0, 0, 0
        req.stay += 1
        if node is not None and self.cache is not None:
            self.cache.unlock(node)
            if not keep:
                own += self.cache.discard(node)
        if own:
            self.pages.free(own)
        if row:
            self.rows.free(row)

    def flush(self) -> int:
        """Give up all that nobody uses; returns how many pages."""
        freed = self.cache.flush() if self.cache else []
        self.pages.free(freed)
        return len(freed)

    # ------------------------------------------------------------ the books

    def check_idle(self) -> str | None:
        """The same as `check` of nobody, but by the counts alone: for the moment when the last request has gone."""
        counts = self.counts
        if self.rows.active or counts.active or (self.cache and self.cache.pages_locked):
            return f"{counts.active} pages are active, {self.rows.active} rows are taken, nothing runs"
        return None

    def check(self, running: Collection[Req]) -> str | None:
        """None if exactly what `running` hold, and what the tree holds, is taken; else what is wrong. Walks over all pages."""
        if self.rows.active != len(running):
            return f"{self.rows.active} rows are taken, {len(running)} requests run"
        own = [page for req in running for page in req.pages[req.shared :]]
        if self.cache is None:
            return self.pages.check(own)
        if (wrong := self.cache.check()) is not None:
            return wrong
        tree = {page: node.locks for node in self.cache.nodes() for page in node.pages}
        used = {page for req in running for page in req.pages[: req.shared]}
        if used != {page for page, locks in tree.items() if locks}:
            return "the tree's locked pages are not those that requests use"
        return self.pages.check([*own, *tree])

    def heal(self) -> None:
        """With nothing running: forget all, so that every page is free again."""
        if self.cache is not None:
            self.cache.clear()
        self.rows.rebuild(())
        self.pages.rebuild(())

    # ------------------------------------------------------------ helpers

    def _namespace(self, req: Req) -> Namespace:
        """KV depends on adapter and weights; there are no adapters yet."""
        return "", self.weights_version

    def _reusable(self, req: Req) -> bytes:
        """The tokens whose KV may be reused: not the last one, whose output is wanted; none where every token's is."""
        return req.key(0 if req.reuses_nothing else req.length - 1)

    def _append(self, req: Req, pages: list[int]) -> None:
        self._place(req, len(req.pages), pages)
        req.pages += pages

    def _place(self, req: Req, index: int, pages: Sequence[int]) -> None:
        """Write the slots of `pages` into the row, as its pages from `index` on."""
        if not pages:
            return
        start = index * self.pages.page_size
        slots = (np.array(pages, dtype=np.int32)[:, None] * self.pages.page_size + self._offsets).ravel()
        line = self.rows.req_to_token[req.row]
        line[start : start + len(slots)] = slots[: len(line) - start]
