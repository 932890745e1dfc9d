"""`Sampler`: greedy and random choice, vectorised over the rows of a step; log-probabilities of outputs and prompts.

Called by a model runner at the end of its step. Every operation works row by row (softmax, cumulative sum, sort along the
last dimension), so a row's token does not depend on which other rows are there. It never raises on what logits hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from llmd.model.batch import SampleRequest, SampleResult
from llmd.sampling.penalties import Penalties
from llmd.sampling.uniform import uniform
from llmd.wire.messages import SamplingParams

#: (logprob, the most likely alternatives as (id, logprob), best first)
Logprob = tuple[float, tuple[tuple[int, float], ...]]

#: How many candidates top_k, top_p and min_p look at, in turns: only a row whose nucleus is larger goes on to the next, at last to
#: all ids. Constants, so that the order among equal logits cannot depend on the batch.
_CANDIDATES = (1024, 8192)


class Sampler:
    """Chooses tokens among the ids that the tokenizer knows; the padding of a model's vocabulary is never sampled."""

    def __init__(self, tokenizer_size: int) -> None:
        self._size = tokenizer_size
        self._penalties = Penalties(tokenizer_size)

    def sample(self, logits: torch.Tensor, wanted: Sequence[SampleRequest]) -> list[SampleResult]:
        """`logits` [L, V] float32, row i belonging to `wanted[i]`; not changed. A row with NaN or Inf gives `finite=False` and token 0."""
        if not wanted:
            return []
        known = logits[:, : self._size]
        finite = _finite(known)
        if not bool(finite.all()):
            known = torch.where(finite[:, None], known, 0.0)
        tokens = self._choose(_ban(self._penalties.apply(known, wanted), wanted), wanted)
        self._penalties.count(wanted, tokens)
        results = [SampleResult(token_id=token, finite=ok) for token, ok in zip(tokens, finite.tolist(), strict=True)]
        self._add_logprobs(known, wanted, results)
        return results

    def prompt_logprobs(self, logits: torch.Tensor, ids: Sequence[int], k: int) -> list[Logprob]:
        """Log-probability of `ids[i]` (and of the `k` most likely ids) under row i of `logits` [N, V] float32.

        A row that is not finite counts as all zeros here; what becomes of its request is decided where its token is sampled.
        """
        if not ids:
            return []
        known = logits[: len(ids), : self._size]
        known = torch.where(_finite(known)[:, None], known, 0.0)
        return _logprobs(known, ids, k)

    def _choose(self, logits: torch.Tensor, wanted: Sequence[SampleRequest]) -> list[int]:
        tokens = [0] * len(wanted)
        groups: dict[str, list[int]] = defaultdict(list)
        for row, request in enumerate(wanted):
            groups[_kind(request.sampling)].append(row)
        for kind, rows in groups.items():
            part = logits if len(rows) == len(wanted) else logits[torch.tensor(rows, device=logits.device)]
            if kind == "greedy":
                chosen = part.argmax(dim=-1)
            else:
                requests = [wanted[row] for row in rows]
                chosen = _draw(part, requests) if kind == "plain" else _draw_filtered(part, requests)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                tokens[row] = token
        return tokens

    def _add_logprobs(self, logits: torch.Tensor, wanted: Sequence[SampleRequest], results: list[SampleResult]) -> None:
        by_k: dict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(wanted):
            if request.logprobs >= 0:
                by_k[request.logprobs].append(row)
        for k, rows in by_k.items():
            part = logits[torch.tensor(rows, device=logits.device)]
            for row, (value, top) in zip(rows, _logprobs(part, [results[row].token_id for row in rows], k), strict=True):
                results[row].logprob, results[row].top = value, top


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """[N] whether a row holds neither NaN nor Inf: both show in its extremes, which are found ten times faster than each is tested."""
    return torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))


def _kind(sampling: SamplingParams) -> str:
    if sampling.temperature <= 0.0 or sampling.top_k == 1:
        return "greedy"
    return "plain" if sampling.top_k < 1 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0 else "filtered"


def _ban(logits: torch.Tensor, wanted: Sequence[SampleRequest]) -> torch.Tensor:
    """Logits with each request's banned ids at -inf; a copy only where something is banned."""
    pairs = [(row, token) for row, request in enumerate(wanted) for token in request.banned_ids if 0 <= token < logits.shape[-1]]
    if not pairs:
        return logits
    rows, ids = (torch.tensor(column, device=logits.device) for column in zip(*pairs, strict=True))
    return logits.index_put((rows, ids), torch.tensor(-torch.inf, dtype=logits.dtype, device=logits.device))


def _probabilities(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """softmax(logits / temperature); the maximum is subtracted first, so that no temperature overflows."""
    temperature = _column(logits, [request.sampling.temperature for request in requests], torch.float32)
    return torch.softmax((logits - logits.amax(dim=-1, keepdim=True)).div_(temperature), dim=-1)


def _column(like: torch.Tensor, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _uniforms(like: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    numbers = uniform([request.sampling.seed for request in requests], [request.position for request in requests])
    return torch.from_numpy(numbers).to(like.device)[:, None]


def _draw(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """[N] ids by inversion: the first id whose cumulative probability, in order of ids, exceeds u."""
    return _invert(_probabilities(logits, requests), _uniforms(logits, requests))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative weight above u times the row's sum: never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _draw_filtered(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """[N] ids after top_k, then top_p over what top_k left, then min_p; by inversion in order of falling probability."""
    probabilities = _probabilities(logits, requests)
    size = probabilities.shape[-1]
    limits = [request.sampling.top_k if request.sampling.top_k > 0 else size for request in requests]
    chosen = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    left = list(range(len(requests)))
    for count in (*(count for count in _CANDIDATES if count < size), size):
        part = probabilities if len(left) == len(requests) else probabilities[torch.tensor(left, device=logits.device)]
        best, ids = part.topk(count, dim=-1) if count < size else part.sort(dim=-1, descending=True, stable=True)
        enough = _candidates_suffice(best, [requests[row] for row in left], [limits[row] for row in left], size)
        places = [place for place, ok in enumerate(enough) if ok]
        if places:
            index = torch.tensor(places, device=logits.device)
            rows = [left[place] for place in places]
            kept = _filter(best[index], [requests[row] for row in rows], [limits[row] for row in rows])
            pick = _invert(kept, _uniforms(logits, [requests[row] for row in rows]))
            chosen[torch.tensor(rows, device=logits.device)] = ids[index].gather(-1, pick[:, None]).squeeze(-1)
        left = [row for row, ok in zip(left, enough, strict=True) if not ok]
        if not left:
            break
    return chosen


def _candidates_suffice(best: torch.Tensor, requests: Sequence[SampleRequest], limits: Sequence[int], size: int) -> list[bool]:
    """Whether no id beyond the candidates can be left after the filters: top_k, or top_p's mass, or min_p's floor ends among them."""
    count = best.shape[-1]
    if count == size:
        return [True] * len(requests)
    mass = best.cumsum(dim=-1, dtype=torch.float64)[:, -1].tolist()
    lowest = (best[:, -1] / best[:, 0]).tolist()
    return [
        limit <= count or (limit == size and (total >= request.sampling.top_p + 1e-6 or ratio < request.sampling.min_p))
        for request, limit, total, ratio in zip(requests, limits, mass, lowest, strict=True)
    ]


def _filter(ordered: torch.Tensor, requests: Sequence[SampleRequest], limits: Sequence[int]) -> torch.Tensor:
    """Falling probabilities [N, K] with those outside top_k, top_p or min_p at 0. The most likely id always stays."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    kept = torch.where(rank < _column(ordered, limits, torch.int64), ordered, 0.0)
    # top_p is a share of what top_k left; without top_k the whole mass is 1 by construction, whatever the candidates leave out.
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    limited = torch.tensor([limit <= ordered.shape[-1] for limit in limits], device=ordered.device)
    whole = torch.where(limited[:, None], before[:, -1:] + kept[:, -1:], torch.ones_like(before[:, -1:]))
    nucleus = before < _column(ordered, [request.sampling.top_p for request in requests], torch.float64) * whole
    likely = ordered >= ordered[:, :1] * _column(ordered, [request.sampling.min_p for request in requests], torch.float32)
    return torch.where((nucleus & likely) | (rank == 0), kept, 0.0)


def _logprobs(logits: torch.Tensor, ids: Sequence[int], k: int) -> list[Logprob]:
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(-1, torch.tensor(ids, device=logits.device)[:, None]).squeeze(-1).tolist()
    if k == 0:
        return [(value, ()) for value in own]
    values, names = table.topk(min(k, table.shape[-1]), dim=-1)
    return [(value, tuple(zip(top, logprobs, strict=True))) for value, top, logprobs in zip(own, names.tolist(), values.tolist(), strict=True)]
