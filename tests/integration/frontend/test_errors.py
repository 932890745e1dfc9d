"""Every fault of a request is answered with the envelope, names its field, and costs nothing else."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from llmd.wire.messages import AbortReq
from tests.daemon import SLOW

from .conftest import wait_for

Shared = Any

COMP: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


TEXT_PART = {"type": "text", "text": "x"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "http://h/x.png"}}


def check(answer: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == ("server_error" if status >= 500 else "overloaded_error" if status == 429 else "invalid_request_error")
    return str(error["message"])


def comp(shared: Shared, **changes: Any) -> httpx.Response:
    return httpx.post(shared.url + "/v1/completions", content=json.dumps({**COMP, **changes}), timeout=10 * SLOW)


def chat(shared: Shared, **changes: Any) -> httpx.Response:
    return httpx.post(shared.url + "/v1/chat/completions", content=json.dumps({**CHAT, **changes}), timeout=10 * SLOW)


INF = float("inf")
NAN = float("nan")
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 0, "stream": True}, "n"),
    ({"n": 100000}, "n"),
    ({"temperature": 999999}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_p": NAN}, "min_p"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "a"}, "seed"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"frequency_penalty": INF}, "frequency_penalty"),
    ({"frequency_penalty": 2.01}, "frequency_penalty"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"257": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"05": 5}}, "logit_bias"),
    ({"logit_bias": {"²": 5}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"logit_bias": {"5": NAN}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"response_format": {"type": "martian"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"regex": "["}, "regex"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_anything_new": "x"}, "guided_anything_new"),
    ({"ebnf": "root ::= x"}, "ebnf"),
    ({"json_schema": {}}, "json_schema"),
    ({"structural_tag": "x"}, "structural_tag"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"best_of": 3}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"priority": 1.5}, "priority"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("changes", "param"), BOTH)
def test_a_bad_field_is_named(shared: Shared, changes: dict[str, Any], param: str) -> None:
    before = len(shared.engine.requests)
    check(comp(shared, **changes), 400, param)
    check(chat(shared, **changes), 400, param)
    assert len(shared.engine.requests) == before


@pytest.mark.parametrize("name", ["999999", "-1", "abc"])
def test_the_bad_id_of_a_logit_bias_is_named(shared: Shared, name: str) -> None:
    assert repr(name) in check(chat(shared, logit_bias={"5": 1, name: 5}), 400, "logit_bias")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [TEXT_PART, IMAGE_PART]}]},
            "messages[0].content[1]",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_a_bad_chat_field_is_named(shared: Shared, changes: dict[str, Any], param: str) -> None:
    check(chat(shared, **changes), 400, param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": [[5], [257]]}, "prompt[1]"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 100}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 2, "suffix": "x"}, "suffix"),
        ({"best_of": 0}, "best_of"),
    ],
)
def test_a_bad_completion_field_is_named(shared: Shared, changes: dict[str, Any], param: str) -> None:
    before = len(shared.engine.requests)
    check(comp(shared, **changes), 400, param)
    assert len(shared.engine.requests) == before


def test_limits_stand_in_the_message(shared: Shared) -> None:
    assert "128" in check(comp(shared, n=100000), 400, "n")
    assert "16" in check(comp(shared, stop=["x"] * 1000), 400, "stop")
    assert "256" in check(comp(shared, prompt=["a"] * 1000), 400, "prompt")


def test_an_unknown_model_names_the_served_one(shared: Shared) -> None:
    assert "toy" in check(chat(shared, model="no-such-model"), 404, "model", "model_not_found")


def test_a_long_prompt_names_both_numbers(shared: Shared) -> None:
    before = len(shared.engine.requests)
    message = check(comp(shared, prompt="x" * 600), 400, "prompt", "context_length_exceeded")
    assert "512" in message
    assert "600" in message
    check(chat(shared, messages=[{"role": "user", "content": "x" * 600}]), 400, "messages", "context_length_exceeded")
    check(comp(shared, prompt=["x", "x" * 600]), 400, "prompt[1]", "context_length_exceeded")
    assert len(shared.engine.requests) == before, "the engine has heard nothing of them"


@pytest.mark.parametrize("send", [comp, chat])
def test_a_budget_beyond_the_context_is_refused_on_both_endpoints(shared: Shared, send: Any) -> None:
    check(send(shared, max_tokens=1000000), 400, "max_tokens", "context_length_exceeded")


def test_the_template_s_own_sentence(shared: Shared) -> None:
    assert "only humans may speak here" in check(chat(shared, messages=[{"role": "function", "content": "x"}]), 400, "messages")


def test_a_template_that_wants_other_roles_is_no_error_of_ours(make_world: Any) -> None:
    """Templates of several models refuse a system message, or two of one role in a row."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    world = make_world(template=template).up()
    for roles, sentence in (("system user", "no system"), ("user user", "alternate"), ("assistant user", "alternate"), ("user assistant user", None)):
        for stream in (False, True):
            answer = chat(world, messages=[{"role": role, "content": "x"} for role in roles.split()], stream=stream)
            if sentence is None:
                assert answer.status_code == 200
            else:
                assert sentence in check(answer, 400, "messages")
    assert "Traceback" not in world.stderr and '"level": "error"' not in world.stderr
    wait_for(lambda: world.outcomes().get("invalid", 0) == 6, 10, "all are counted")
    assert "error" not in world.outcomes()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"nul", b'{"a": 1,}', b"\xff\xfe{", b"[" * 20000, b'{"a":' * 20000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_broken_json(shared: Shared, body: bytes) -> None:
    check(httpx.post(shared.url + "/v1/completions", content=body), 400, None, "invalid_json")


def test_bare_infinity_in_the_text(shared: Shared) -> None:
    check(httpx.post(shared.url + "/v1/completions", content=b'{"prompt":"x","temperature":1e999}'), 400, "temperature")
    check(httpx.post(shared.url + "/v1/completions", content=b'{"prompt":"x","top_p":NaN}'), 400, "top_p")


def test_body_too_large_declared_and_chunked(shared: Shared) -> None:
    check(httpx.post(shared.url + "/v1/completions", content=b"x" * 3_000_000), 413, None, "request_too_large")
    check(httpx.post(shared.url + "/v1/completions", content=(b"x" * 10_000 for _ in range(200))), 413, None, "request_too_large")


def test_unknown_paths_and_methods(shared: Shared) -> None:
    for path in ("/nope", "/v1/nope", "/v1/models/", "//v1/models", "/V1/models", "/redoc"):
        check(httpx.get(shared.url + path), 404, "model" if path == "/v1/models/" else None, "model_not_found" if path == "/v1/models/" else "not_found")
    answer = httpx.get(shared.url + "/v1/completions")
    check(answer, 405, None, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    check(httpx.delete(shared.url + "/v1/models"), 405, None, "method_not_allowed")


def test_bytes_that_are_not_http(shared: Shared) -> None:
    with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1])), timeout=5 * SLOW) as raw:
        raw.sendall(b"HELLO\r\n\r\n")
        answer = b""
        while data := raw.recv(4096):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_headers_are_bounded(shared: Shared) -> None:
    answer = httpx.get(shared.url + "/livez", headers={"X-Big": "x" * 100_000})
    check(answer, 431, None)


@pytest.mark.parametrize("value", [b"x" * 129, "ü".encode(), b""])
def test_bad_request_ids(shared: Shared, value: bytes) -> None:
    answer = httpx.get(shared.url + "/livez", headers=[(b"X-Request-Id", value)])
    check(answer, 400, "X-Request-Id")
    assert "x-request-id" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_is_a_status_line(shared: Shared, stream: bool) -> None:
    def refuse(request: Any) -> AbortReq:
        return AbortReq(rid=request.rid, epoch=1, code="queue_full", message="512 requests wait already")

    before, shared.engine.script = shared.engine.script, refuse
    try:
        answer = comp(shared, stream=stream)
        assert check(answer, 429, None, "queue_full") == "512 requests wait already"
        assert answer.headers["retry-after"] == "1"
    finally:
        shared.engine.script = before


def test_without_a_template_chat_is_refused_and_text_is_not(make_world: Any) -> None:
    world = make_world(template=None).up()
    check(chat(world), 400, "messages", "no_chat_template")
    assert comp(world).status_code == 200
    assert "no chat template" in world.stderr


def test_strict_refuses_unknown_fields(make_world: Any) -> None:
    world = make_world(strict=True).up()
    check(comp(world, temprature=1), 400, "temprature")
    assert comp(world, user="u", metadata={}).status_code == 200


def test_unknown_fields_are_ignored_by_default(shared: Shared) -> None:
    assert comp(shared, temprature=1).status_code == 200


def test_a_path_that_is_not_served_is_named_with_some_that_are(shared: Shared) -> None:
    said = check(httpx.get(shared.url + "/v1/nowhere"), 404, None, "not_found")
    assert "/v1/nowhere" in said and "POST /v1/chat/completions" in said
    assert "takes POST, not GET" in check(httpx.get(shared.url + "/v1/completions"), 405, None, "method_not_allowed")


def test_the_root_lists_what_is_served(shared: Shared) -> None:
    answer = httpx.get(shared.url + "/")
    assert answer.status_code == 200
    assert {"POST /v1/chat/completions", "GET /v1/models", "GET /readyz", "GET /metrics"} <= set(answer.json()["paths"])
