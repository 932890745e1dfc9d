"""The official client gets what it expects, streamed and not."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.daemon import SLOW

Shared = Any


@pytest.fixture
def client(shared: Shared) -> Any:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="unused", max_retries=0, timeout=10 * SLOW) as made:
        yield made


CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
COMP: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 8}


def test_completion_has_text_usage_and_ids(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**COMP, extra_headers={"X-Request-Id": "mine-1"})
    answer = raw.parse()
    assert answer.choices[0].text == "hellohel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert abs(answer.created - time.time()) < 5
    assert answer.system_fingerprint == "toy@abc"
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-llmd-rid"] == answer.id
    assert raw.headers["x-llmd-weights"] == "toy@abc"


def test_chat_goes_through_the_template(client: openai.OpenAI, shared: Shared) -> None:
    answer = client.chat.completions.create(**CHAT)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "user:hi\n"
    assert bytes(shared.engine.requests[-1].input_ids) == b"user:hi\nassistant:"


def test_text_parts_and_the_developer_role(client: openai.OpenAI, shared: Shared) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="toy", max_tokens=2, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])  # type: ignore[list-item, misc]
    assert bytes(shared.engine.requests[-1].input_ids) == b"system:x\nuser:a\nb\nassistant:"


def test_chat_stream_to_the_letter(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [c.choices[0].delta.content for c in chunks[1:-2]]
    assert all(contents)
    assert "".join(contents) == "user:hi\n"  # type: ignore[arg-type]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8  # type: ignore[union-attr]
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_usage_chunk_unless_wished(shared: Shared, options: Any) -> None:
    body = httpx.post(shared.url + "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options}).text
    events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert all("usage" not in json.loads(e) and json.loads(e)["choices"] for e in events)


def test_raw_stream_has_the_event_type_and_one_done(shared: Shared) -> None:
    answer = httpx.post(shared.url + "/v1/completions", json={**COMP, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count("data: [DONE]") == 1
    assert answer.text.endswith("data: [DONE]\n\n")


def test_several_prompts_and_choices(client: openai.OpenAI, shared: Shared) -> None:
    answer = client.completions.create(model="toy", prompt=["a", "b", "c"], n=2, max_tokens=3, temperature=0.7, seed=1)
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices] == ["aaa", "aaa", "bbb", "bbb", "ccc", "ccc"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 18)  # type: ignore[union-attr]
    assert [r.sampling.seed for r in shared.engine.requests[-6:]] == [1, 2, 1, 2, 1, 2]
    answer = client.completions.create(model="toy", prompt=[[104, 105], [106]], max_tokens=2)
    assert [c.text for c in answer.choices] == ["hi", "jj"]
    answer = client.completions.create(model="toy", prompt=[104, 105], max_tokens=3)
    assert answer.choices[0].text == "hih"


def test_several_choices_in_a_stream_finish_once_each(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    finishes: list[int] = []
    for chunk in client.completions.create(model="toy", prompt=["ab", "cd"], n=2, max_tokens=4, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes += [choice.index] if choice.finish_reason else []
    assert texts == {0: "abab", 1: "abab", 2: "cdcd", 3: "cdcd"}
    assert sorted(finishes) == [0, 1, 2, 3]


def test_echo_and_logprobs_alike_streamed_and_not(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": "toy", "prompt": "hello world", "echo": True, "logprobs": 1, "max_tokens": 6}
    whole = client.completions.create(**wish).choices[0]
    assert whole.text == "hello worldhello "
    assert whole.logprobs is not None
    assert len(whole.logprobs.tokens or []) == 17
    assert [i for i, value in enumerate(whole.logprobs.token_logprobs or []) if value is None] == [0]
    assert whole.logprobs.text_offset == list(range(17))
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**wish, stream=True):
        for name, values in joined.items():
            values += getattr(chunk.choices[0].logprobs, name, None) or []
    assert joined == {name: getattr(whole.logprobs, name) for name in joined}


def test_max_tokens_zero_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="abc", echo=True, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0  # type: ignore[union-attr]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == 8
    assert content[0].bytes == [ord("u")]
    assert len(content[0].top_logprobs) == 2
    streamed = []
    for chunk in client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert [s.token for s in streamed] == [c.token for c in content]


def test_null_means_the_default(client: openai.OpenAI) -> None:
    names = ("max_tokens", "stop", "n", "logprobs", "seed", "stream", "stream_options", "logit_bias", "user", "temperature", "top_p", "echo", "model")
    answer = client.completions.create(**{**COMP, "prompt": "hello"}, extra_body={**dict.fromkeys(names), "max_tokens": 8})
    assert answer.choices[0].text == "hellohel"


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 7}, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3  # type: ignore[union-attr]


def test_default_budget_is_what_is_left_of_the_context(client: openai.OpenAI, shared: Shared) -> None:
    client.completions.create(model="toy", prompt="hello")
    assert shared.engine.requests[-1].sampling.max_new_tokens == 512 - 5


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, shared: Shared) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [7], "skip_special_tokens": False, "repetition_penalty": 1.5}
    penalties: dict[str, Any] = {"presence_penalty": 2, "frequency_penalty": -2.0, "logit_bias": {"5": -100, "0": 0.5}}
    client.completions.create(**COMP, temperature=0.5, top_p=0.9, seed=-1, stop=["x", "yy"], **penalties, extra_body=extra)
    request = shared.engine.requests[-1]
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 5, 0.1, 2**64 - 1)
    assert (s.ignore_eos, s.min_new_tokens, s.stop_token_ids, s.max_new_tokens) == (True, 2, (7,), 8)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (2.0, -2.0, 1.5)
    assert s.logit_bias == ((5, -100.0), (0, 0.5))
    assert request.detokenize.stop == ("x", "yy")
    assert not request.detokenize.skip_special_tokens


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_sixty_four_streams_each_get_their_own_text(shared: Shared) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> None:
        text = ""
        async for chunk in await client.completions.create(model="toy", prompt=f"<{i:02d}>", max_tokens=40, stream=True):
            text += chunk.choices[0].text
        assert text == f"<{i:02d}>" * 10

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key="unused", max_retries=0, timeout=20 * SLOW) as client:
            await asyncio.gather(*(one(client, i) for i in range(64)))

    asyncio.run(all_of_them())
