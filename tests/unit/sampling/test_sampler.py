"""What a sampler promises: the right distribution, and a token that neither the batch nor a restart changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmd.model.batch import SampleRequest
from llmd.sampling.sampler import Sampler
from llmd.wire.messages import SamplingParams


def ask(position: int = 0, *, logprobs: int = -1, banned: tuple[int, ...] = (), **sampling: Any) -> SampleRequest:
    return SampleRequest(row=0, sampling=SamplingParams(max_new_tokens=1, **sampling), position=position, logprobs=logprobs, banned_ids=banned)


def logits_of(rows: int, size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def frequencies(row: torch.Tensor, draws: int = 20_000, **sampling: Any) -> torch.Tensor:
    size = row.shape[-1]
    results = Sampler(size).sample(row.expand(draws, size), [ask(i, seed=11, **sampling) for i in range(draws)])
    return torch.bincount(torch.tensor([r.token_id for r in results]), minlength=size).double() / draws


def assert_close_to(observed: torch.Tensor, expected: torch.Tensor) -> None:
    assert (observed[expected == 0] == 0).all()
    assert (observed - expected).abs().max() < 0.015


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 0.0, 0.0, 9.5]])
    assert [r.token_id for r in Sampler(4).sample(logits, [ask(temperature=0.0)] * 2)] == [1, 3]
    assert [r.token_id for r in Sampler(4).sample(logits, [ask(top_k=1)] * 2)] == [1, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row = logits_of(1, 12, spread=1.5)
    assert_close_to(frequencies(row, temperature=temperature), torch.softmax(row[0].double() / temperature, dim=-1))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.4}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
        ({"top_p": 1e-9}, [0]),
    ],
)
def test_filters_keep_the_right_ids_in_proportion(filters: dict[str, Any], kept: list[int]) -> None:
    probabilities = torch.tensor([0.45, 0.27, 0.18, 0.07, 0.03], dtype=torch.float64)
    shuffled = torch.tensor([3, 0, 4, 1, 2])
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    observed = frequencies(probabilities[shuffled].log().float()[None], **filters)
    assert_close_to(observed, expected[shuffled])


def test_a_nucleus_larger_than_the_candidates_is_still_whole() -> None:
    size = 4000
    row = logits_of(1, size, spread=0.01)
    observed = frequencies(row, draws=8_000, top_p=0.9)
    assert 2900 < int((observed > 0).sum()) <= 3700


def test_a_token_depends_on_seed_position_and_its_logits_alone() -> None:
    size, rows = 5000, 24
    logits = logits_of(rows, size)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 40, "min_p": 0.01},
        {"top_p": 0.999, "temperature": 3.0},
        {"temperature": 1e-7},
    ]
    wanted = [ask(i, seed=i % 5, logprobs=i % 3, **kinds[i % len(kinds)]) for i in range(rows)]
    together = Sampler(size).sample(logits, wanted)
    assert [Sampler(size).sample(logits[i : i + 1], [wanted[i]])[0] for i in range(rows)] == together
    backwards = Sampler(size).sample(logits.flip(0), wanted[::-1])
    assert backwards[::-1] == together


def test_seeds_and_positions_give_different_tokens() -> None:
    flat = torch.zeros(50, 1000)
    by_position = {r.token_id for r in Sampler(1000).sample(flat, [ask(i, seed=1) for i in range(50)])}
    by_seed = {r.token_id for r in Sampler(1000).sample(flat, [ask(0, seed=i) for i in range(50)])}
    assert len(by_position) > 40 and len(by_seed) > 40


def test_padding_and_banned_ids_are_never_sampled() -> None:
    logits = torch.zeros(400, 20)
    logits[:, 10:] = 50.0
    logits[:, 3] = 40.0
    for sampling in ({"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 5}):
        results = Sampler(10).sample(logits, [ask(i, banned=(3, 4, 99), logprobs=9, **sampling) for i in range(400)])
        assert {r.token_id for r in results} <= set(range(10)) - {3, 4}
        assert all(token < 10 for r in results for token, _ in r.top)


def test_rows_that_are_not_finite_are_flagged_and_harm_no_other() -> None:
    logits = logits_of(4, 50)
    clean = Sampler(50).sample(logits, [ask(i, seed=4, logprobs=2) for i in range(4)])
    spoilt = logits.clone()
    spoilt[1, 7], spoilt[2, 0], spoilt[3] = float("nan"), float("inf"), float("-inf")
    results = Sampler(50).sample(spoilt, [ask(i, seed=4, logprobs=2) for i in range(4)])
    assert [r.finite for r in results] == [True, False, False, False]
    assert results[0] == clean[0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(2, 30)
    table = torch.log_softmax(logits, dim=-1)
    greedy, drawn = Sampler(30).sample(logits, [ask(temperature=0.0, logprobs=3), ask(5, temperature=1.7, top_k=9, logprobs=0, banned=(1,))])
    assert greedy.logprob == pytest.approx(table[0].max().item())
    assert [token for token, _ in greedy.top] == table[0].topk(3).indices.tolist()
    assert greedy.top[0] == (greedy.token_id, greedy.logprob)
    assert drawn.logprob == pytest.approx(table[1, drawn.token_id].item()) and drawn.top == ()


def test_prompt_logprobs_belong_to_the_given_ids() -> None:
    logits = logits_of(3, 30)
    table = torch.log_softmax(logits, dim=-1)
    entries = Sampler(30).prompt_logprobs(logits, [4, 29, 0], 2)
    assert [value for value, _ in entries] == pytest.approx([table[0, 4].item(), table[1, 29].item(), table[2, 0].item()])
    assert [len(top) for _, top in entries] == [2, 2, 2]
    assert Sampler(30).prompt_logprobs(logits, [], 2) == []
