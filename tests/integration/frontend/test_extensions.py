"""Fields beyond OpenAI's that vLLM and SGLang have given their clients: what they bring, and what they tell the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW

Shared = Any

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMP: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}


def whole(shared: Shared, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{shared.url}/v1/{path}", json=body, timeout=10 * SLOW)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(shared: Shared, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{shared.url}/v1/{path}", json={**body, "stream": True}, timeout=10 * SLOW)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_usage_in_every_chunk_counts_up_to_that_of_the_end(shared: Shared) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", COMP)):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(shared, path, {**body, "n": 2, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-2] == counts[-1] == 8
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
        assert chunks[-1]["choices"] == []
        plain = events(shared, path, {**body, "stream_options": {"continuous_usage_stats": True}})
        assert not any(chunk.get("usage") for chunk in plain)


def test_usage_is_null_until_the_end_where_it_is_asked_for_once(shared: Shared) -> None:
    chunks = events(shared, "completions", {**COMP, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert "usage" not in events(shared, "completions", COMP)[0]


def test_token_ids_come_with_the_text(shared: Shared) -> None:
    answer = whole(shared, "completions", {**COMP, "return_token_ids": True})["choices"][0]
    assert (bytes(answer["prompt_token_ids"]), bytes(answer["token_ids"])) == (b"hello", b"hell")
    chat = whole(shared, "chat/completions", {**CHAT, "return_token_ids": True})
    assert (bytes(chat["prompt_token_ids"]), bytes(chat["choices"][0]["token_ids"])) == (b"user:hi\nassistant:", b"user")
    chunks = events(shared, "completions", {**COMP, "return_token_ids": True, "logprobs": 1, "n": 2})
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert bytes(id for choice in mine for id in choice["token_ids"]) == b"hell"
        assert [bytes(choice["prompt_token_ids"]) for choice in mine if "prompt_token_ids" in choice] == [b"hello"]
    chunks = events(shared, "chat/completions", {**CHAT, "return_token_ids": True})
    assert bytes(chunks[0]["prompt_token_ids"]) == b"user:hi\nassistant:"
    assert bytes(id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])) == b"user"
    assert "token_ids" not in whole(shared, "completions", COMP)["choices"][0]


def test_logprobs_can_name_tokens_by_their_ids(shared: Shared) -> None:
    answer = whole(shared, "completions", {**COMP, "logprobs": 2, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert answer["tokens"][0] == "token_id:104"
    assert set(answer["top_logprobs"][0]) == {"token_id:104", "token_id:65"}
    chat = whole(shared, "chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True})
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], [t["token"] for t in first["top_logprobs"]]) == ("token_id:117", [117], ["token_id:117"])


def test_prompt_logprobs_by_id_and_rank(shared: Shared) -> None:
    answer = whole(shared, "completions", {**COMP, "prompt": ["hello", "abc"], "n": 2, "prompt_logprobs": 1})
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(entries) for entries in shown] == [5, 5, 3, 3]
    assert shown[0][0] is None
    assert (shown[0][1]["101"]["rank"], shown[0][1]["101"]["decoded_token"]) == (1, "e")
    assert answer["choices"][0]["logprobs"] is None
    asked = [r for r in shared.engine.requests[-4:] if r.prompt_logprobs]
    assert len(asked) == 2, "once for each prompt"
    chat = whole(shared, "chat/completions", {**CHAT, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == len("user:hi\nassistant:")
    assert chat["prompt_logprobs"][1]["115"]["decoded_token"] == "s"
    assert chat["choices"][0]["logprobs"] is None


def test_fewer_output_logprobs_than_prompt_logprobs(shared: Shared) -> None:
    answer = whole(shared, "chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 2})
    assert [len(entry["top_logprobs"]) for entry in answer["choices"][0]["logprobs"]["content"]] == [1] * 4
    assert len(answer["prompt_logprobs"][1]) == 2


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_text_may_end_with_what_stopped_it(shared: Shared, name: str) -> None:
    whole(shared, "completions", {**COMP, "stop": "zz", name: True, "spaces_between_special_tokens": False})
    assert shared.engine.requests[-1].detokenize.include_stop
    whole(shared, "completions", {**COMP, "stop": "zz", name: None, "spaces_between_special_tokens": None})
    assert not shared.engine.requests[-1].detokenize.include_stop


def test_a_chat_goes_on_with_its_last_message(shared: Shared) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    answer = whole(shared, "chat/completions", {**CHAT, "messages": messages, "continue_final_message": True})
    assert bytes(shared.engine.requests[-1].input_ids) == b"user:hi\nassistant:well, "
    assert answer["choices"][0]["message"]["content"] == "user"
    body = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True, "n": 2}
    assert [choice["message"]["content"] for choice in whole(shared, "chat/completions", body)["choices"]] == ["well, user"] * 2
    chunks = events(shared, "chat/completions", body)
    for index in (0, 1):
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == index)
        assert text == "well, user"
    plain = whole(shared, "chat/completions", {**CHAT, "messages": messages, "echo": True})
    assert plain["choices"][0]["message"]["content"] == "user", "nothing is repeated where a new message begins"


def test_the_template_gets_arguments(make_world: Any) -> None:
    world = make_world(template="{{ mood | default('calm') }}:{{ messages[-1].content }}").up()
    httpx.post(world.url + "/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {"mood": "keen"}})
    assert bytes(world.engine.requests[-1].input_ids) == b"keen:hi"
    httpx.post(world.url + "/v1/chat/completions", json={**CHAT, "chat_template_kwargs": None})
    assert bytes(world.engine.requests[-1].input_ids) == b"calm:hi"


def test_a_template_that_hides_the_last_message_cannot_go_on_with_it(make_world: Any) -> None:
    world = make_world(template="{{ messages | length }}").up()
    answer = httpx.post(world.url + "/v1/chat/completions", json={**CHAT, "continue_final_message": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"


NULLS = (
    "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens",
    "max_completion_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "user", "stream", "stream_options",
    "priority", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "continue_final_message", "add_generation_prompt", "chat_template_kwargs",
    "chat_template", "add_special_tokens", "return_token_ids", "tools", "tool_choice", "response_format", "regex", "ebnf", "json_schema", "guided_json",
    "structured_outputs", "temperature", "top_p", "top_k", "min_p", "n", "model", "suffix", "functions", "function_call", "modalities", "length_penalty",
)  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", COMP)])
def test_null_is_the_default_of_every_field(shared: Shared, path: str, body: dict[str, Any]) -> None:
    def told() -> Any:
        request = shared.engine.requests[-1]
        return request.input_ids, request.detokenize, request.logprobs, request.priority, request.sampling

    plain = whole(shared, path, {**body, "seed": 1})
    expected = told()
    assert whole(shared, path, {**dict.fromkeys(NULLS), **body, "seed": 1})["choices"] == plain["choices"]
    assert told() == expected


def test_asking_for_nothing_is_no_fault(shared: Shared) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": 1, "best_of": 1, "regex": "", "parallel_tool_calls": True}
    whole(shared, "chat/completions", {**CHAT, **nothing})
    whole(shared, "completions", {**COMP, **nothing})


def test_what_is_not_built_says_so(shared: Shared) -> None:
    for field in ({"regex": "a"}, {"response_format": {"type": "json_object"}}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        for path, body in (("chat/completions", CHAT), ("completions", COMP)):
            answer = httpx.post(f"{shared.url}/v1/{path}", json={**body, **field, "stream": True})
            assert answer.status_code == 400
            assert "not built in this version" in answer.json()["error"]["message"]


def test_strict_looks_into_messages_and_formats(make_world: Any) -> None:
    world = make_world(strict=True).up()
    message = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "refusal": None, "annotations": [], "tool_calls": None}
    good = {**CHAT, "messages": [{"role": "user", "content": "x", "name": "y"}, message], "response_format": {"type": "text"}}
    assert httpx.post(world.url + "/v1/chat/completions", json=good).status_code == 200
    for change, param in (
        ({"messages": [*good["messages"], {"role": "user", "content": "x", "foo": None}]}, "messages[2].foo"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]}, "messages[0].content[0].foo"),
        ({"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
    ):
        answer = httpx.post(world.url + "/v1/chat/completions", json={**good, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    answer = httpx.post(world.url + "/tokenize", json={"messages": [{"role": "user", "content": "x", "foo": 1}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].foo")


def test_strict_looks_into_stream_options(make_world: Any) -> None:
    world = make_world(strict=True).up()
    answer = httpx.post(world.url + "/v1/completions", json={**COMP, "stream": True, "stream_options": {"include_usages": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.include_usages"
