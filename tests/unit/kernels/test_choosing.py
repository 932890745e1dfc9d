"""The native sampler chooses what the torch sampler chooses, from the same logits, and tells the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from llmd.kernels.program import Floats, Pool, Program, Shape
from llmd.kernels.steps import Steps
from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.sampling.sampler import Sampler
from llmd.wire.messages import SamplingParams
from tests.unit.kernels.native import isas, packed, using

pytestmark = pytest.mark.skipif(not isas(), reason="the native kernels are not built")
ROWS = 48


@pytest.fixture(params=isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    with using(request.param):
        yield request.param


class Native:
    """A program without layers whose logits are given: token i's embedding is the unit vector that picks column i of the head."""

    def __init__(self, size: int, logits: Floats, unit: Floats | None = None) -> None:
        rows, vocab = logits.shape
        unit = np.eye(rows, dtype=np.float32) if unit is None else unit
        self.program = Program(
            Pool(2), Shape(hidden=rows, heads=1, kv_heads=1, head_dim=2, layers=1, vocab=vocab, sampled_ids=size), np.ones(1, dtype=np.float32)
        )
        embedding = self.program.matrix(packed("F32", rows, rows, unit, "F32"), "F32", rows, rows)
        head = self.program.matrix(packed("F32", vocab, rows, np.ascontiguousarray(logits.T), "F32"), "F32", vocab, rows)
        x = self.program.embed(embedding, self.program.buffer(rows))
        self.program.sample(self.program.linear(self.program.select(x), head, self.program.buffer(vocab)))
        self.program.set_cache(16 * (rows + 1))
        self.steps = Steps(self.program)

    def sample(self, wanted: list[SampleRequest]) -> list[SampleResult]:
        """Request i has row i of the logits."""
        count = len(wanted)
        slots = 16 * (1 + np.arange(count, dtype=np.int64))
        batch = ForwardBatch(
            input_ids=np.arange(count, dtype=np.int64), positions=np.zeros(count, dtype=np.int64), out_cache_loc=slots,
            req_pool_indices=np.arange(count, dtype=np.int64), seq_lens=np.ones(count, dtype=np.int64), extend_lens=np.ones(count, dtype=np.int64),
            req_to_token=np.ascontiguousarray(slots.astype(np.int32)[:, None]),
        )  # fmt: skip
        return self.steps.step(batch, wanted)


def ask(
    row: int,
    *,
    position: int = 0,
    logprobs: int = -1,
    banned: tuple[int, ...] = (),
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    **sampling: Any,
) -> SampleRequest:
    return SampleRequest(
        row=row, sampling=SamplingParams(max_new_tokens=1, **sampling), position=position, logprobs=logprobs, banned_ids=banned,
        prompt_ids=[] if prompt is None else prompt, output_ids=[] if output is None else output,
    )  # fmt: skip


def logits_of(rows: int, size: int, *, spread: float = 3.0, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((rows, size)) * spread).astype(np.float32)


def assert_same(logits: Floats, size: int, wanted: list[SampleRequest], *, differing: int = 0) -> list[SampleResult]:
    """`differing`: choices that rounding may move to a neighbour."""
    expected = Sampler(size).sample(torch.from_numpy(logits[: len(wanted)]), wanted)
    found = Native(size, logits).sample(wanted)
    assert sum(one.token_id != other.token_id for one, other in zip(expected, found, strict=True)) <= differing
    for one, other in zip(expected, found, strict=True):
        assert other.finite == one.finite
        if one.logprob is None:
            assert other.logprob is None
        elif one.token_id == other.token_id:
            assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [id for id, _ in other.top] == [id for id, _ in one.top]
            assert [value for _, value in other.top] == pytest.approx([value for _, value in one.top], abs=1e-5)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 1": {"top_k": 1},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 20},
    "large top_k": {"top_k": 3000, "temperature": 2.0},
    "all top_k": {"top_k": 100_000},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 1e-9},
    "large top_p": {"top_p": 0.9999, "temperature": 2.0},
    "min_p": {"min_p": 0.05},
    "small min_p": {"min_p": 1e-6, "temperature": 1.5},
    "all three": {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    "top_k and top_p": {"top_k": 500, "top_p": 0.5, "temperature": 4.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "size"), [(5003, 5000), (40, 33), (300, 300)])
def test_choices(kind: str, vocab: int, size: int) -> None:
    logits = logits_of(ROWS, vocab)
    assert_same(logits, size, [ask(row, seed=row, position=3 * row, logprobs=row % 4, **KINDS[kind]) for row in range(ROWS)], differing=1)


def test_flat_logits_need_all_candidates() -> None:
    logits = logits_of(ROWS, 4000, spread=0.01)
    assert_same(logits, 4000, [ask(row, seed=row, top_p=0.9) for row in range(ROWS)], differing=3)
    far = logits_of(ROWS, 4000, spread=0.01)
    far[:, 17] = 20.0  # mass beyond what is looked at first
    assert_same(far, 4000, [ask(row, seed=row, top_p=0.999999, temperature=4.0) for row in range(ROWS)], differing=3)


def test_equals_go_to_the_lower_id() -> None:
    logits = np.zeros((2, 600), dtype=np.float32)
    logits[:, [90, 300, 599]] = 5.0
    (one, other) = Native(600, logits).sample([ask(0, temperature=0.0, logprobs=4), ask(1, top_k=2, seed=5, logprobs=0)])
    assert one.token_id == 90
    assert [id for id, _ in one.top] == [90, 300, 599, 0]
    assert other.token_id in (90, 300)


def test_penalties_biases_and_bans() -> None:
    logits = logits_of(ROWS, 2000)
    best = logits[:, :1990].argsort(axis=-1)[:, ::-1]
    wanted = []
    for row in range(ROWS):
        seen, more = best[row, :5].tolist(), best[row, 2:9].tolist()
        options: list[dict[str, Any]] = [
            {"repetition_penalty": 1.8}, {"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"repetition_penalty": 0.5, "frequency_penalty": -1.0},
            {"logit_bias": ((seen[0], -100.0), (seen[3], 2.5), (seen[3], 1.5), (1995, 50.0), (50_000, 1.0))},
            {"repetition_penalty": 1.3, "logit_bias": ((int(best[row, 30]), 30.0),)}, {},
        ]  # fmt: skip
        output = [*seen, *seen[:2], 1999]
        wanted.append(ask(
            row, position=len(output), prompt=[*more, 1992], output=output, banned=(seen[1], 1991, 99_999) if row % 2 else (), seed=row, logprobs=2,
            temperature=0.0 if row % 3 else 1.0, **options[row % len(options)],
        ))  # fmt: skip
    assert_same(logits, 1990, wanted, differing=1)


def test_counts_go_on_from_step_to_step() -> None:
    logits = logits_of(1, 200)
    native, sampler = Native(200, logits), Sampler(200)
    outputs: tuple[list[int], list[int]] = ([], [])
    for position in range(30):
        one, other = (ask(0, position=position, prompt=[3, 4], output=output, frequency_penalty=0.8, temperature=0.0) for output in outputs)
        outputs[0].append(native.sample([one])[0].token_id)
        outputs[1].append(sampler.sample(torch.from_numpy(logits), [other])[0].token_id)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 255, 256, 1989])
def test_one_number_that_is_not_finite_spoils_a_row(bad: float, place: int) -> None:
    logits = logits_of(1, 2000)
    logits[0, 1995] = bad  # beyond what may be sampled
    assert Native(1990, logits).sample([ask(0, logprobs=1)])[0].finite
    logits[0, place] = bad
    (result,) = Native(1990, logits).sample([ask(0, logprobs=1)])
    assert (result.finite, result.token_id) == (False, 0)
    assert result.logprob == pytest.approx(-np.log(1990), abs=1e-5)


def test_a_spoilt_row_leaves_the_others_alone() -> None:
    logits, unit = logits_of(3, 2000), np.eye(3, dtype=np.float32)
    wanted = [ask(row, seed=row, logprobs=1) for row in range(3)]
    clean = Native(1990, logits).sample(wanted)
    unit[1, 1] = np.nan
    assert [result.finite for result in clean] == [True, True, True]
    assert [one == other for one, other in zip(Native(1990, logits, unit).sample(wanted), clean, strict=True)] == [True, False, True]


def test_everything_banned_is_still_an_answer() -> None:
    (result,) = Native(20, logits_of(1, 20)).sample([ask(0, banned=tuple(range(20)))])
    assert 0 <= result.token_id < 20
