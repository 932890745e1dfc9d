"""From a sampled token to the chunk that tells of it, and from pooled parts to a text's vector."""

from __future__ import annotations

from llmd.model.batch import SampleResult
from llmd.scheduler.req import Req
from llmd.scheduler.schedule_batch import ScheduleBatch
from llmd.wire.messages import TokenChunk, TokenLogprob


def chunk_of(req: Req, result: SampleResult, context_length: int) -> TokenChunk:
    """Append the token to `req` (unless only its prompt's logprobs were asked for) and make its chunk."""
    source = req.source
    prompt = _prompt_logprobs(req, result) if source.prompt_logprobs and not req.output_ids and not req.announced else None
    first = len(req.output_ids)
    new = [result.token_id] if req.remaining > 0 else []
    req.output_ids += new
    logprobs = [TokenLogprob(result.token_id, result.logprob, result.top)] if new and source.logprobs >= 0 else None
    start = None if req.announced else source.detokenize
    if start is not None and first:  # a request that goes on here: the detokenizer has to know all of its text
        first, new = 0, list(req.output_ids)
    req.announced = True
    return TokenChunk(req.rid, source.frontend, first, new, req.finish(context_length), logprobs, start, prompt, req.cached_tokens)


def vectors_of(batch: ScheduleBatch) -> list[tuple[Req, bytes | None]]:
    """Take in what a step that is settled has pooled; each text that is complete with it, and its vector, None where it is not finite."""
    complete: list[tuple[Req, bytes | None]] = []
    for embed in batch.embeds:
        req, count = batch.reqs[embed.row], batch.extend_lens[embed.row]
        if req.done or req.stay != batch.stays[embed.row] or req.pool is None:
            continue
        if embed.vector is None:
            raise RuntimeError("the runner gave no vector for a text")
        req.pool.add(embed.vector, first=req.settled == count)
        if req.settled == req.length:
            complete.append((req, req.pool.vector()))
    return complete


def _prompt_logprobs(req: Req, result: SampleResult) -> list[TokenLogprob]:
    """One entry a prompt token; the first has no logprob, since nothing predicts it."""
    ids = req.source.input_ids
    entries = result.prompt_logprobs or []
    if len(entries) != len(ids) - 1:
        raise RuntimeError(f"the runner gave {len(entries)} prompt logprobs for {len(ids) - 1} tokens")
    return [TokenLogprob(ids[0], None), *(TokenLogprob(token, value, top) for token, (value, top) in zip(ids[1:], entries, strict=True))]
