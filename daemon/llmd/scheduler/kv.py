"""`KvManager`: gives rows and pages to requests and takes them back. The only code that touches the pools."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from llmd.memory.pools import ReqToTokenPool, TokenToKVPoolAllocator
from llmd.scheduler.req import Req


class KvManager:
    """A request's row lists the KV slot of each of its tokens; its pages cover at least the tokens that a step computes."""

    def __init__(self, rows: ReqToTokenPool, pages: TokenToKVPoolAllocator) -> None:
        self.rows = rows
        self.pages = pages
        self._offsets = np.arange(pages.page_size, dtype=np.int32)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pages.pages_total * self.pages.page_size

    def missing_pages(self, req: Req, tokens: int) -> int:
        """Pages still to be taken before `tokens` tokens of `req` have room."""
        return max(0, self.pages.pages_for(tokens) - len(req.pages))

    def grow(self, req: Req, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of `req`; False, with nothing taken, when there are too few pages or rows."""
        taken = self.pages.alloc(self.missing_pages(req, tokens))
        if taken is None:
            return False
        if not req.row:
            row = self.rows.alloc()
            if row is None:
                self.pages.free(taken)
                return False
            req.row = row
        if taken:
            start = len(req.pages) * self.pages.page_size
            slots = (np.array(taken, dtype=np.int32)[:, None] * self.pages.page_size + self._offsets).ravel()
            line = self.rows.req_to_token[req.row]
            line[start : start + len(slots)] = slots[: len(line) - start]
            req.pages += taken
        return True

    def release(self, req: Req) -> None:
        """Take everything back; what was computed is forgotten."""
        pages, row = req.pages, req.row
        req.pages, req.row, req.computed = [], 0, 0
        if pages:
            self.pages.free(pages)
        if row:
            self.rows.free(row)

    def check(self, running: Collection[Req]) -> str | None:
        """None if exactly what `running` hold is taken; else what is wrong."""
        if self.rows.active != len(running):
            return f"{self.rows.active} rows are taken, {len(running)} requests run"
        return self.pages.check([page for req in running for page in req.pages])

    def heal(self, running: Collection[Req]) -> None:
        """Make the pools agree with what `running` hold."""
        self.rows.rebuild(req.row for req in running)
        self.pages.rebuild([page for req in running for page in req.pages])
