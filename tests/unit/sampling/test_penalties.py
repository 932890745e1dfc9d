"""Penalties and biases: the documented arithmetic, and a token that neither the batch nor a restart changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmd.model.batch import SampleRequest
from llmd.sampling.penalties import Penalties
from llmd.sampling.sampler import Sampler
from llmd.wire.messages import SamplingParams

SIZE = 40


def ask(prompt: list[int], output: list[int], *, position: int | None = None, logprobs: int = -1, **sampling: Any) -> SampleRequest:
    params = SamplingParams(max_new_tokens=9, **sampling)
    where = len(output) if position is None else position
    return SampleRequest(row=0, sampling=params, position=where, logprobs=logprobs, prompt_ids=prompt, output_ids=output)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def expected(logits: torch.Tensor, prompt: list[int], output: list[int], s: SamplingParams) -> list[float]:
    """The same, id by id."""
    values = logits.tolist()
    for token in range(SIZE):
        if token in prompt or token in output:
            values[token] = values[token] / s.repetition_penalty if values[token] > 0 else values[token] * s.repetition_penalty
        values[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty * (token in output)
        values[token] += sum(value for id_, value in s.logit_bias if id_ == token)
    return values


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 0.25},
        {"logit_bias": ((3, -100.0), (39, 5.0), (4000, 50.0), (SIZE, 100.0))},
        {"repetition_penalty": 2.0, "logit_bias": ((1, 2.5),), "frequency_penalty": 2.0},
    ],
)
def test_the_arithmetic(sampling: dict[str, Any]) -> None:
    prompt, output = [1, 1, 5, 9, 4000], [5, 7, 7, 7, 39]
    logits = logits_of(3)
    plain = ask([1], [2])
    request = ask(prompt, output, **sampling)
    found = Penalties(SIZE).apply(logits, [plain, request, plain])
    assert found[1].tolist() == pytest.approx(expected(logits[1], prompt, output, request.sampling), rel=1e-5, abs=1e-5)
    assert torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert torch.equal(logits, logits_of(3)), "the caller's logits are left alone"


def test_nothing_is_copied_where_nothing_is_asked_for() -> None:
    logits = logits_of(2)
    assert Penalties(SIZE).apply(logits, [ask([1], [2])] * 2) is logits


def test_going_on_equals_starting_anew_at_any_token() -> None:
    wishes = {"frequency_penalty": 0.9, "repetition_penalty": 1.2, "temperature": 0.8, "seed": 5}
    prompts = [[row, 2, 3] for row in range(6)]
    outputs: list[list[int]] = [[] for _ in prompts]
    running = Sampler(SIZE)
    for position in range(12):
        logits = logits_of(len(prompts), position)
        anew = [Sampler(SIZE).sample(logits[i : i + 1], [ask(prompts[i], list(outputs[i]), **wishes)])[0] for i in range(len(prompts))]
        rows = [row for row in range(len(prompts)) if position < 4 or position > 6 or row % 2]  # half of them stay away for a while
        found = dict(zip(rows, running.sample(logits[rows], [ask(prompts[row], outputs[row], **wishes) for row in rows]), strict=True))
        for row, result in found.items():
            assert result == anew[row]
            outputs[row].append(result.token_id)


def test_a_token_that_is_not_in_the_list_yet_counts() -> None:
    late, wishes = [4, 4], {"presence_penalty": 2.0, "temperature": 0.0}
    flat = torch.zeros(1, SIZE)
    flat[0, 7], flat[0, 8] = 1.0, 0.5
    sampler = Sampler(SIZE)
    first = sampler.sample(flat, [ask([1], late, position=2, **wishes)])[0]
    second = sampler.sample(flat, [ask([1], late, position=3, **wishes)])[0]
    assert (first.token_id, second.token_id) == (7, 8)


def test_extremes_stay_finite_and_within_the_known_ids() -> None:
    logits = torch.cat([logits_of(4), torch.full((4, 8), 99.0)], dim=-1)
    extremes = [
        {"repetition_penalty": 1e-300, "temperature": 2.0},
        {"repetition_penalty": 1e-38, "temperature": 1e-9},
        {"logit_bias": (*((id_, -100.0) for id_ in range(SIZE)), (SIZE + 2, 100.0))},
        {"frequency_penalty": -2.0, "top_p": 0.1},
    ]
    for position in range(20):
        results = Sampler(SIZE).sample(logits, [ask(list(range(SIZE)), list(range(position)), seed=3, **wishes) for wishes in extremes])
        assert all(result.finite and 0 <= result.token_id < SIZE for result in results)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(1)
    result = Sampler(SIZE).sample(logits, [ask([1], [1], logprobs=2, temperature=0.0, logit_bias=((3, 100.0),))])[0]
    assert result.token_id == 3
    assert result.logprob == pytest.approx(torch.log_softmax(logits, dim=-1)[0, 3].item())
    assert [token for token, _ in result.top] == logits[0].topk(2).indices.tolist()
