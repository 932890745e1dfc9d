"""`ScheduleBatch`: the requests of one step, how many tokens each of them computes, and the arrays a runner takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmd.model.batch import EmbedRequest, ForwardBatch, SampleRequest
from llmd.scheduler.chunk import NO_CHUNK, Chunk
from llmd.scheduler.req import Req


@dataclass(slots=True)
class ScheduleBatch:
    """Filled by the managers, then run once. Decoding requests and (chunks of) prompts may be mixed."""

    reqs: list[Req] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    streams: int = 0
    """Requests that are past their prompt."""
    chunk: Chunk = NO_CHUNK
    """What there was room for."""
    hurried: bool = False
    """Its prompt tokens are more than suit the streams beside them."""
    stays: list[int] = field(default_factory=list)
    """Each request's `stay` at the launch."""
    embeds: list[EmbedRequest] = field(default_factory=list)

    def add(self, req: Req, tokens: int, *, prefill: bool) -> None:
        """`req` computes its next `tokens` tokens; it has the KV pages for them."""
        if req.pool is not None and req.pool.wants(first=req.computed == 0, last=tokens == req.pending):
            self.embeds.append(EmbedRequest(len(self.reqs), req.pool.pooling))
        self.reqs.append(req)
        self.extend_lens.append(tokens)
        if prefill:
            self.prefill_tokens += tokens

    @property
    def phase(self) -> str:
        """`prefill` if any prompt is in it, else `decode`."""
        return "prefill" if self.prefill_tokens else "decode"

    def forward_batch(self, req_to_token: npt.NDArray[np.int32], *, detached: bool) -> ForwardBatch:
        """The arrays; see ForwardBatch for shapes. `detached`: with a copy of the rows, which may change before the step runs."""
        input_ids: list[int] = []
        for req, count in zip(self.reqs, self.extend_lens, strict=True):
            input_ids += req.tokens(req.computed, req.computed + count)
        extend_lens = np.array(self.extend_lens, dtype=np.int64)
        computed = np.array([req.computed for req in self.reqs], dtype=np.int64)
        rows = np.array([req.row for req in self.reqs], dtype=np.int64)
        # Position of token t of request b: computed[b] + (t - first token of b in the batch).
        starts = np.cumsum(extend_lens) - extend_lens
        positions = np.arange(len(input_ids), dtype=np.int64) + np.repeat(computed - starts, extend_lens)
        out_cache_loc = req_to_token[np.repeat(rows, extend_lens), positions].astype(np.int64)
        seq_lens = computed + extend_lens
        if detached:
            req_to_token, rows = req_to_token[rows, : int(seq_lens.max())], np.arange(len(rows))
        return ForwardBatch(
            input_ids=np.array(input_ids, dtype=np.int64),
            positions=positions,
            out_cache_loc=out_cache_loc,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            extend_lens=extend_lens,
            req_to_token=req_to_token,
            embeds=self.embeds,
        )

    def wanted(self) -> list[SampleRequest]:
        """One for each request whose sequence is complete with this step, and that generates at all."""
        pairs = enumerate(zip(self.reqs, self.extend_lens, strict=True))
        return [_sample_request(b, req) for b, (req, count) in pairs if count == req.pending and req.pool is None]

    def launch(self, wanted: list[SampleRequest]) -> None:
        """The step is on its way: what it computes counts as computed, and each wanted token as one that is unseen."""
        for req, count in zip(self.reqs, self.extend_lens, strict=True):
            req.computed += count
            self.stays.append(req.stay)
        for place, request in enumerate(wanted):
            req = self.reqs[request.row]
            req.unseen, req.place = req.unseen + 1, place

    def undo(self, wanted: list[SampleRequest]) -> None:
        """The step has failed: it brings no tokens."""
        for request in wanted:
            self.reqs[request.row].unseen -= 1

    def settle(self, wanted: list[SampleRequest]) -> None:
        """The step is over: its KV is written. A request that has lost its KV meanwhile gets its token all the same."""
        for req, count, stay in zip(self.reqs, self.extend_lens, self.stays, strict=True):
            if req.stay == stay:
                req.settled += count
        for request in wanted:
            self.reqs[request.row].unseen -= 1


def _sample_request(row: int, req: Req) -> SampleRequest:
    source = req.source
    return SampleRequest(
        row=row,
        sampling=source.sampling,
        position=len(req.output_ids) + req.unseen,
        logprobs=source.logprobs,
        prompt_logprob_ids=source.input_ids[1:] if req.wants_prompt_logprobs else [],
        banned_ids=req.banned_ids,
        prompt_ids=source.input_ids,
        output_ids=req.output_ids,
    )
