"""Tables of seen ids say what a count over the whole request would say, whenever a request joins, goes or comes back."""

from __future__ import annotations

import random
from collections import Counter

from llmd.model.batch import SampleRequest
from llmd.sampling.seen import SeenTable, SeenTables
from llmd.wire.messages import SamplingParams

PENALTIES = SamplingParams(max_new_tokens=1, frequency_penalty=0.5)


def request(prompt: list[int], output: list[int], position: int | None = None, sampling: SamplingParams = PENALTIES) -> SampleRequest:
    return SampleRequest(row=0, sampling=sampling, position=len(output) if position is None else position, prompt_ids=prompt, output_ids=output)


def said(table: SeenTable) -> dict[int, int]:
    ids = table.ids[: table.n].tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, table.counts[: table.n].tolist(), strict=True))


def expected(prompt: list[int], output: list[int], size: int) -> dict[int, int]:
    return {id: count for id, count in {**dict.fromkeys(prompt, 0), **Counter(output)}.items() if id < size}


def test_a_request_from_its_first_token_to_its_last() -> None:
    dice, size = random.Random(0), 400
    prompt, output = dice.choices(range(450), k=30), list[int]()
    tables = SeenTables(size)
    for _ in range(300):
        (table,) = tables.settle([request(prompt, output)]).values()
        assert said(table) == expected(prompt, output, size)
        token = dice.randrange(450)
        output.append(token)
        table.add(token)


def test_the_last_token_may_not_be_in_the_list_yet() -> None:
    output: list[int] = []
    tables = SeenTables(100)
    (table,) = tables.settle([request([1], output)]).values()
    table.add(7)
    (again,) = tables.settle([request([1], output, position=1)]).values()
    assert again is table and said(again) == {1: 0, 7: 1}


def test_who_was_left_out_is_counted_anew() -> None:
    output: list[int] = [5, 5]
    tables = SeenTables(100)
    (table,) = tables.settle([request([1], output)]).values()
    assert tables.settle([]) == {}
    output.append(9)
    (other,) = tables.settle([request([1], output)]).values()
    assert other is not table and said(other) == {1: 0, 5: 2, 9: 1}


def test_requests_without_penalties_have_none() -> None:
    assert SeenTables(10).settle([request([1], [], sampling=SamplingParams(max_new_tokens=1))]) == {}


def test_an_empty_request() -> None:
    (table,) = SeenTables(10).settle([request([], [])]).values()
    assert said(table) == {}
    table.add(3)
    assert said(table) == {3: 1}
