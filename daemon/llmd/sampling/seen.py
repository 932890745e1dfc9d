"""`SeenTables`: which ids each penalized request has seen, and how often each is in its output, for samplers that take lists of them.

A table is made from the request's prompt and output when it is not there or not up to date, so a request that comes back, here or in a new
process, goes on as it would have; after that each step adds the token that it chose. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmd.model.batch import SampleRequest

Ids = npt.NDArray[np.int32]


class SeenTable:
    """One request's. `ids[:n]` are distinct; `counts[:n]` say how often each is in the output, 0 for ids of the prompt alone."""

    def __init__(self, request: SampleRequest, size: int) -> None:
        """`size`: ids from there on are ignored."""
        self.output_ids = request.output_ids
        self.counted = request.position
        prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        output = np.asarray(request.output_ids[: request.position], dtype=np.int64)
        distinct, inverse = np.unique(np.concatenate((output, prompt)), return_inverse=True)
        known = int(np.searchsorted(distinct, size))
        self.n = known
        self.ids: Ids = np.empty(known + 64, dtype=np.int32)
        self.counts: Ids = np.zeros(known + 64, dtype=np.int32)
        self.ids[:known] = distinct[:known]
        self.counts[:known] = np.bincount(inverse[: len(output)], minlength=len(distinct))[:known]
        self._places = {id: place for place, id in enumerate(distinct[:known].tolist())}
        self._size = size

    def add(self, token: int) -> None:
        """One more token of the output."""
        self.counted += 1
        if token >= self._size:
            return
        place = self._places.setdefault(token, self.n)
        if place == self.n:
            if self.n == len(self.ids):
                self.ids, self.counts = np.resize(self.ids, 2 * self.n), np.resize(self.counts, 2 * self.n)
            self.ids[place], self.counts[place] = token, 0
            self.n += 1
        self.counts[place] += 1


class SeenTables:
    """The tables of the requests of one step after the other. A request that a step leaves out loses its table."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tables: dict[int, SeenTable] = {}

    def settle(self, wanted: Sequence[SampleRequest]) -> dict[int, SeenTable]:
        """id(request.output_ids), which is the request's own list, -> its table, up to date, for those of `wanted` that have penalties."""
        kept: dict[int, SeenTable] = {}
        for request in wanted:
            if request.sampling.has_penalties:
                key = id(request.output_ids)
                table = self._tables.get(key)
                # The table holds the list, so that nobody else's can have the same id.
                kept[key] = table if table is not None and table.counted == request.position else SeenTable(request, self._size)
        self._tables = kept
        return kept
