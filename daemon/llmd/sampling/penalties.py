"""Penalties and logit_bias: what a request's own tokens and wishes do to its logits before a token is chosen.

For each request that asks for them a table row counts its output tokens and marks the ids that it has seen. A row is made from the
request's prompt and output when it is not there or not up to date, so a request that comes back, here or in a new process, goes on as it
would have; after that each step adds the tokens that it chose. All rows of a step are worked on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmd.model.batch import SampleRequest

#: Logits are kept within this, so that the smallest repetition penalty makes no infinity and no difference overflows.
_BOUND = 1e38


@dataclass(slots=True)
class _Entry:
    """One request's row. `output_ids`, the request's own list, tells requests apart; `counted` of its tokens are in."""

    row: int
    output_ids: Sequence[int]
    counted: int


class Penalties:
    """Tables over the ids that the tokenizer knows. A request that a step leaves out loses its row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[int, _Entry] = {}
        self._counts = torch.zeros((0, size), dtype=torch.int32)
        self._seen = torch.zeros((0, size), dtype=torch.bool)

    def apply(self, logits: torch.Tensor, wanted: Sequence[SampleRequest]) -> torch.Tensor:
        """`logits` [L, size] after repetition, frequency and presence penalties, then biases; a copy only where something is asked for."""
        penalized = [row for row, request in enumerate(wanted) if request.sampling.has_penalties]
        biased = [row for row, request in enumerate(wanted) if request.sampling.logit_bias]
        self._settle([wanted[row] for row in penalized])
        if not penalized and not biased:
            return logits
        logits = logits.clone()
        if penalized:
            index = torch.tensor(penalized, device=logits.device)
            logits[index] = self._penalize(logits[index], [wanted[row] for row in penalized])
        if biased:
            entries = [(row, token, value) for row in biased for token, value in wanted[row].sampling.logit_bias if 0 <= token < self._size]
            rows, ids, values = zip(*entries, strict=True) if entries else ((), (), ())
            place = tuple(torch.tensor(column, dtype=torch.int64, device=logits.device) for column in (rows, ids))
            logits.index_put_(place, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)
        return logits

    def count(self, wanted: Sequence[SampleRequest], tokens: Sequence[int]) -> None:
        """The step chose `tokens`."""
        rows, ids = [], []
        for request, token in zip(wanted, tokens, strict=True):
            if request.sampling.has_penalties:
                entry = self._entries[id(request.output_ids)]
                entry.counted += 1
                rows.append(entry.row)
                ids.append(token)
        if rows:
            self._counts[rows, ids] += 1
            self._seen[rows, ids] = True

    def _penalize(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
        """`logits` [N, size] of penalized rows; changed."""
        rows = torch.tensor([self._entries[id(request.output_ids)].row for request in requests])
        counts, seen = (table[rows].to(logits.device) for table in (self._counts, self._seen))
        wishes = [(r.sampling.repetition_penalty, r.sampling.frequency_penalty, r.sampling.presence_penalty) for r in requests]
        repetition, frequency, presence = torch.tensor(wishes, dtype=logits.dtype, device=logits.device).unsqueeze(-1).unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits.sub_(frequency * counts).sub_(presence * (counts > 0)).clamp_(-_BOUND, _BOUND)

    def _settle(self, requests: Sequence[SampleRequest]) -> None:
        """A row that is up to date for each of `requests`, and for nobody else."""
        kept = {id(request.output_ids): request for request in requests}
        self._entries = {key: entry for key, entry in self._entries.items() if key in kept}
        free = sorted(set(range(len(self._counts))) - {entry.row for entry in self._entries.values()}, reverse=True)
        for key, request in kept.items():
            entry = self._entries.get(key)
            if entry is not None and entry.counted == request.position:
                continue
            if entry is None:
                if not free:
                    free = self._grow()
                entry = self._entries[key] = _Entry(free.pop(), request.output_ids, 0)
            self._fill(entry, request)

    def _fill(self, entry: _Entry, request: SampleRequest) -> None:
        output = torch.tensor(request.output_ids[: request.position], dtype=torch.int64)
        prompt = torch.tensor(request.prompt_ids, dtype=torch.int64)
        self._counts[entry.row] = torch.bincount(output[output < self._size], minlength=self._size)
        self._seen[entry.row] = self._counts[entry.row] > 0
        self._seen[entry.row, prompt[prompt < self._size]] = True
        entry.counted = request.position

    def _grow(self) -> list[int]:
        """Twice the rows; returns the new ones."""
        before = len(self._counts)
        more = max(4, before)
        self._counts = torch.cat([self._counts, torch.zeros((more, self._size), dtype=torch.int32)])
        self._seen = torch.cat([self._seen, torch.zeros((more, self._size), dtype=torch.bool)])
        return list(range(before + more - 1, before - 1, -1))
