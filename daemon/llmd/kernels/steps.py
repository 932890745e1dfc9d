"""`Steps`: from a scheduler's batch and wishes to one call of a program, and from what the call wrote back to results. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmd.kernels.program import Program, Step
from llmd.model.batch import EmbedRequest, ForwardBatch, Ints, SampleRequest, SampleResult
from llmd.sampling.seen import SeenTables
from llmd.sampling.uniform import uniform

#: src/sampling.h's LogitRow.
LOGIT_ROW: Final = np.dtype(
    [
        ("row", "i8"), ("uniform", "f8"), ("top_p", "f8"), ("seen", "u8"), ("counts", "u8"), ("bias_ids", "u8"), ("biases", "u8"), ("banned", "u8"),
        ("top_ids", "u8"), ("top_logprobs", "u8"), ("temperature", "f4"), ("min_p", "f4"), ("repetition", "f4"), ("frequency", "f4"), ("presence", "f4"),
        ("top_k", "i4"), ("seen_n", "i4"), ("bias_n", "i4"), ("banned_n", "i4"), ("top_n", "i4"), ("scored", "i4"), ("wants_logprob", "i4"),
        ("token", "i4"), ("finite", "i4"), ("logprob", "f4"), ("reserved", "i4"),
    ]
)  # fmt: skip
#: src/step_plan.h's EmbedRow.
EMBED_ROW: Final = np.dtype([("first", "i8"), ("count", "i8"), ("sum", "u8")])

Rows = npt.NDArray[Any]


class Steps:
    """Runs steps of one program, one after the other."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._size = program.shape.sampled_ids
        self._seen = SeenTables(self._size)

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        """See llmd.model.batch.Runner. Raises KernelError."""
        ends = np.cumsum(batch.extend_lens)
        arrays = _Arrays(self._size, wanted, self._seen, ends, batch.extend_lens)
        embeds, sums = _embed_rows(batch.embeds, ends, batch.extend_lens, self._program.shape.hidden)
        self._program.run(step_of(batch, arrays.rows, embeds))
        for request, vector in zip(batch.embeds, sums, strict=True):
            request.vector = vector.astype(np.float32)
        return arrays.results()


def step_of(batch: ForwardBatch, rows: Rows, embeds: Rows) -> Step:
    """What the library takes; it points to the arrays. `rows`: LogitRows, `embeds`: EmbedRows."""
    table = batch.req_to_token
    assert table.flags.c_contiguous
    columns = (batch.input_ids, batch.positions, batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens, batch.extend_lens)
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in columns)
    return Step(
        len(batch.input_ids), len(batch.seq_lens), len(rows), len(embeds), *(column.ctypes.data for column in columns),
        table.ctypes.data, *table.shape, rows.ctypes.data, embeds.ctypes.data,
    )  # fmt: skip


def _embed_rows(requests: Sequence[EmbedRequest], ends: Ints, lengths: Ints, hidden: int) -> tuple[Rows, npt.NDArray[np.float64]]:
    rows, sums = np.zeros(len(requests), dtype=EMBED_ROW), np.zeros((len(requests), hidden))
    for row, request, total in zip(rows, requests, sums, strict=True):
        end, count = int(ends[request.row]), int(lengths[request.row])
        first = end - 1 if request.pooling == "last" else end - count
        row["first"], row["count"], row["sum"] = first, count if request.pooling == "mean" else 1, total.ctypes.data
    return rows, sums


class _Arrays:
    """The LogitRows of one step: first the rows to be sampled, then those of prompt logprobs. Keeps alive what they point to."""

    def __init__(self, size: int, wanted: list[SampleRequest], seen: SeenTables, ends: Ints, lengths: Ints) -> None:
        self._wanted = wanted
        self._kept: list[Any] = []
        prompts = [request for request in wanted if request.prompt_logprob_ids]
        self.rows = rows = np.zeros(len(wanted) + sum(len(request.prompt_logprob_ids) for request in prompts), dtype=LOGIT_ROW)
        rows["top_p"] = rows["repetition"] = 1.0
        rows["scored"] = -1
        self._options(rows[: len(wanted)], ends)
        self._lists(rows, seen)
        at = len(wanted)
        for request in prompts:
            part = rows[at : at + len(request.prompt_logprob_ids)]
            first = int(ends[request.row] - lengths[request.row])
            part["row"] = np.arange(first, first + len(part))
            part["scored"] = request.prompt_logprob_ids
            part["top_n"] = max(request.logprobs, 0)
            at += len(part)
        self._best(size)

    def _options(self, rows: Rows, ends: Ints) -> None:
        if not len(rows):
            return
        wanted = self._wanted
        samplings = [request.sampling for request in wanted]
        rows["row"] = ends[[request.row for request in wanted]] - 1
        rows["temperature"] = [sampling.temperature for sampling in samplings]
        if any(sampling.temperature > 0.0 for sampling in samplings):
            rows["uniform"] = uniform([sampling.seed for sampling in samplings], [request.position for request in wanted])
            rows["top_p"] = [sampling.top_p for sampling in samplings]
            rows["min_p"] = [sampling.min_p for sampling in samplings]
            rows["top_k"] = [sampling.top_k for sampling in samplings]
        logprobs = [request.logprobs for request in wanted]
        if max(logprobs) >= 0:
            rows["wants_logprob"] = [count >= 0 for count in logprobs]
            rows["top_n"] = [max(count, 0) for count in logprobs]

    def _lists(self, rows: Rows, seen: SeenTables) -> None:
        """Penalties, biases and bans: of few requests, or of none."""
        self._tables = tables = seen.settle(self._wanted)
        for row, request in enumerate(self._wanted):
            sampling = request.sampling
            if sampling.has_penalties:
                table = tables[id(request.output_ids)]
                rows["seen"][row], rows["counts"][row], rows["seen_n"][row] = self._of(table.ids), self._of(table.counts), table.n
                rows["repetition"][row], rows["frequency"][row] = sampling.repetition_penalty, sampling.frequency_penalty
                rows["presence"][row] = sampling.presence_penalty
            if sampling.logit_bias:
                ids, values = zip(*sampling.logit_bias, strict=True)
                rows["bias_ids"][row], rows["biases"][row] = self._of(np.array(ids, dtype=np.int32)), self._of(np.array(values, dtype=np.float32))
                rows["bias_n"][row] = len(ids)
            if request.banned_ids:
                rows["banned"][row], rows["banned_n"][row] = self._of(np.array(request.banned_ids, dtype=np.int32)), len(request.banned_ids)

    def _best(self, size: int) -> None:
        """Room for the most likely ids of each row that wants them."""
        rows = self.rows
        most = min(int(rows["top_n"].max(initial=0)), size)
        self._top_ids = np.zeros((len(rows), most), dtype=np.int32)
        self._top_logprobs = np.zeros((len(rows), most), dtype=np.float32)
        if most:
            rows["top_n"] = np.minimum(rows["top_n"], size)
            places = np.arange(len(rows), dtype=np.uint64) * np.uint64(4 * most)
            rows["top_ids"] = places + np.uint64(self._top_ids.ctypes.data)
            rows["top_logprobs"] = places + np.uint64(self._top_logprobs.ctypes.data)

    def _of(self, array: npt.NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data

    def results(self) -> list[SampleResult]:
        """What the library wrote. Counts the chosen tokens."""
        rows, wanted = self.rows, self._wanted
        tokens, finite = rows["token"][: len(wanted)].tolist(), rows["finite"][: len(wanted)].tolist()
        results = [SampleResult(token_id=token, finite=bool(ok)) for token, ok in zip(tokens, finite, strict=True)]
        for request, token in zip(wanted, tokens, strict=True):
            if request.sampling.has_penalties:
                self._tables[id(request.output_ids)].add(token)
        at = len(wanted)
        for index, (request, result) in enumerate(zip(wanted, results, strict=True)):
            if request.logprobs >= 0:
                result.logprob, result.top = self._logprob(index)
            if request.prompt_logprob_ids:
                result.prompt_logprobs = [self._logprob(at + i) for i in range(len(request.prompt_logprob_ids))]
                at += len(request.prompt_logprob_ids)
        return results

    def _logprob(self, row: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        count = int(self.rows["top_n"][row])
        best = zip(self._top_ids[row, :count].tolist(), self._top_logprobs[row, :count].tolist(), strict=True)
        return float(self.rows["logprob"][row]), tuple(best)
