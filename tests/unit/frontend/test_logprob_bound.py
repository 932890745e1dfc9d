"""What a request may ask for in logprobs, over all its prompts and choices."""

from __future__ import annotations

import pytest

from llmd.errors import RequestError
from llmd.frontend.limits import MAX_LOGPROBS
from llmd.frontend.logprob_bound import bounded
from llmd.frontend.tokenizer_manager import ChoiceSpec
from llmd.wire.messages import SamplingParams


def choices(count: int, prompt: int, new: int, top: int, *, of_prompt: bool = False, least: int = 0) -> list[ChoiceSpec]:
    spec = ChoiceSpec([1] * prompt, SamplingParams(max_new_tokens=new, min_new_tokens=least), logprobs=top, prompt_logprobs=of_prompt)
    return [spec] * count


@pytest.mark.parametrize(
    "specs", [choices(4, 4000, 4000, 20), choices(8, 100, 1000, 20), choices(256, 8000, 8000, -1), choices(1, 8000, 100, 20, of_prompt=True)]
)
def test_ordinary_use_passes_as_it_is(specs: list[ChoiceSpec]) -> None:
    assert bounded(specs, wished=True, param="logprobs") == specs


@pytest.mark.parametrize("specs", [choices(256, 7000, 1, 20, of_prompt=True), choices(128, 1, 1000, 20), choices(64, 4000, 100, 20, of_prompt=True)])
def test_too_many_are_refused_by_name(specs: list[ChoiceSpec]) -> None:
    with pytest.raises(RequestError) as caught:
        bounded(specs, wished=True, param="top_logprobs")
    assert (caught.value.status, caught.value.param) == (400, "top_logprobs")
    assert str(MAX_LOGPROBS) in caught.value.message


def test_those_of_a_prompt_count_as_often_as_they_are_shown() -> None:
    specs = [*choices(1, 4000, 1, 20, of_prompt=True), *choices(127, 4000, 1, 20)]
    assert bounded(specs, wished=True, param="prompt_logprobs", shown=6) == specs
    with pytest.raises(RequestError, match=str(MAX_LOGPROBS)):
        bounded(specs, wished=True, param="prompt_logprobs", shown=7)


def test_where_nobody_said_how_many_tokens_it_is_as_many_as_fit() -> None:
    found = bounded(choices(2, 10, 100_000, 20), wished=False, param="logprobs")
    assert [spec.sampling.max_new_tokens for spec in found] == [MAX_LOGPROBS // 42] * 2
    for specs in (choices(2, 10, 100_000, 20, least=20_000), choices(256, 7000, 9, 20, of_prompt=True)):
        with pytest.raises(RequestError):
            bounded(specs, wished=False, param="logprobs")
