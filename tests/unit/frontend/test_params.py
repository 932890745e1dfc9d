"""Budgets, seeds and shapes that both endpoints share."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from llmd.errors import RequestError
from llmd.frontend.fields import Fields
from llmd.frontend.openai.chat import ChatAnswer
from llmd.frontend.openai.completions import TextAnswer, read_prompts
from llmd.frontend.openai.logprobs import TextLogprobs, chat_logprobs
from llmd.frontend.openai.messages import read_messages
from llmd.frontend.openai.params import RequestParams, read_params, token_budget
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta
from llmd.wire.messages import Finish, TokenLogprob


def params(least: int = 1, **fields: Any) -> RequestParams:
    return read_params(Fields(fields), vocabulary=300, least_tokens=least, fresh_seed=lambda: secrets.randbits(63))


def budget(prompt: int, p: RequestParams, context: int = 100, kv: int | None = None) -> int:
    return token_budget(p, prompt, context=context, kv=kv, param="prompt")


def test_defaults() -> None:
    p = params()
    assert (p.stream, p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.min_tokens) == (False, 1, 1.0, 1.0, -1, 0.0, 0)
    assert p.detokenize.skip_special_tokens
    assert p.detokenize.stop == ()


def test_without_a_seed_every_request_has_its_own_and_choices_differ() -> None:
    assert params().seed != params().seed
    p = params(seed=7)
    assert [p.sampling(i, 5).seed for i in range(3)] == [7, 8, 9]
    assert len({params(seed=s).sampling(0, 5).seed for s in (-(2**63), -1, 0, 2**63 - 1)}) == 4, "all 64 bits count"
    assert all(0 <= params(seed=s).sampling(1, 5).seed < 2**64 for s in (-(2**63), -1, 2**63 - 1))


def test_numbers_too_small_to_compute_with_are_zero_or_the_smallest() -> None:
    p = params(temperature=1e-38, min_p=1e-50, top_p=1e-300, repetition_penalty=1e-46, frequency_penalty=-1e-40)
    assert p.temperature == p.min_p == p.penalties.frequency == 0
    assert p.top_p == p.penalties.repetition == 1e-30
    assert params(temperature=1e-6).temperature == 1e-6


@pytest.mark.parametrize("value", ["x", ["x", "y"], None, [], ["x"] * 5])
def test_legal_stops(value: Any) -> None:
    stop = params(stop=value).detokenize.stop
    assert list(stop) == ([value] if isinstance(value, str) else value or [])


def test_top_k_0_is_off_too() -> None:
    assert params(top_k=0).top_k == params(top_k=-1).top_k == -1


def test_the_budget_is_what_fits() -> None:
    assert budget(40, params()) == 60
    assert budget(40, params(), kv=50) == 10
    assert budget(40, params(max_tokens=60)) == 60
    assert budget(99, params()) == 1
    assert budget(100, params(0, max_tokens=0)) == 0


@pytest.mark.parametrize(
    ("prompt", "wish", "kv", "code", "param"),
    [
        (100, {}, None, "context_length_exceeded", "prompt"),
        (101, {"max_tokens": 0}, None, "context_length_exceeded", "prompt"),
        (40, {"max_tokens": 61}, None, "context_length_exceeded", "max_tokens"),
        (40, {"max_completion_tokens": 61}, None, "context_length_exceeded", "max_completion_tokens"),
        (40, {}, 40, "exceeds_kv_capacity", "prompt"),
        (40, {"max_tokens": 11}, 50, "exceeds_kv_capacity", "max_tokens"),
    ],
)
def test_what_cannot_fit_is_refused_with_both_numbers(prompt: int, wish: dict[str, Any], kv: int | None, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        budget(prompt, params(0, **wish), kv=kv)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert str(kv or 100) in caught.value.message


def test_messages_become_strings() -> None:
    given = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "n"},
        {"role": "assistant", "content": None},
    ]
    assert read_messages(Fields({"messages": given})) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


def test_prompt_shapes() -> None:
    def shapes(value: Any) -> Any:
        return read_prompts(Fields({"prompt": value}), 300)

    assert shapes("a") == [("prompt", "a")]
    assert shapes(["a", "b"]) == [("prompt[0]", "a"), ("prompt[1]", "b")]
    assert shapes([1, 2]) == [("prompt", [1, 2])]
    assert shapes([[1], [2, 3]]) == [("prompt[0]", [1]), ("prompt[1]", [2, 3])]


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line]


def delta(text: str = "", finish: Finish | None = None, logprobs: list[TokenLogprob] | None = None, index: int = 0) -> Delta:
    return Delta(index, text, [], logprobs or [], None, finish)


def test_chat_chunks_hold_no_empty_content() -> None:
    answer = ChatAnswer("r", "m", "f", params(stream=True), Usage([3], 1), logprobs=-1)
    first = events(answer.chunk(delta('é\n"')))
    assert [e["choices"][0]["delta"] for e in first] == [{"role": "assistant", "content": ""}, {"content": 'é\n"'}]
    assert answer.chunk(delta()) == b""
    last = events(answer.chunk(delta("x", Finish("stop", 5))))
    assert [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in last] == [({"content": "x"}, None), ({}, "stop")]
    assert answer.closing() == b""


def test_logprobs_of_held_back_tokens_come_with_the_next_text() -> None:
    answer = ChatAnswer("r", "m", "f", params(stream=True), Usage([3], 1), logprobs=0)
    one, two = TokenLogprob(1, -1.0, (), b"\xf0\x9f"), TokenLogprob(2, -2.0, (), b"\x98\x80")
    answer.chunk(delta(logprobs=[one]))
    chunk = events(answer.chunk(delta("😀", logprobs=[two])))[-1]["choices"][0]
    assert [c["bytes"] for c in chunk["logprobs"]["content"]] == [[0xF0, 0x9F], [0x98, 0x80]]
    end = events(answer.chunk(delta(finish=Finish("length"))))[-1]["choices"][0]
    assert end["logprobs"] is None


def test_text_chunks_echo_once_for_each_choice() -> None:
    answer = TextAnswer("r", "m", "f", params(stream=True, n=2), Usage([1, 1], 2), ["P", "Q"], -1)
    texts = [events(answer.chunk(delta(t, index=i)))[0]["choices"][0]["text"] for i, t in [(0, "a"), (3, "b"), (0, "c"), (1, "d")]]
    assert texts == ["Pa", "Qb", "c", "Pd"]


def test_offsets_count_characters_over_split_ones() -> None:
    entries = [TokenLogprob(0, -1.0, (), data) for data in (b"a", b"\xf0\x9f", b"\x98\x80", "é".encode(), b"z")]
    builder = TextLogprobs(0)
    body = [builder.body(entries[:2]), builder.body(entries[2:])]
    assert body[0]["text_offset"] + body[1]["text_offset"] == [0, 1, 1, 2, 3]
    assert body[0]["tokens"] == ["a", "bytes:\\xf0\\x9f"]
    assert body[0]["top_logprobs"] is None


def test_json_can_hold_every_logprob() -> None:
    body = chat_logprobs([TokenLogprob(1, float("-inf"), ((2, float("-inf")),), b"a", (b"b",))], 1)
    assert json.loads(dumps(body))["content"][0]["logprob"] == -9999.0
