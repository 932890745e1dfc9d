"""/tokenize and /detokenize, and what the server says of itself to SGLang's clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW

from .conftest import CONTEXT, EOS, World


def post(world: World, path: str, **body: Any) -> httpx.Response:
    text = json.dumps(body)  # lone surrogates travel as escapes
    return httpx.post(world.url + path, content=text, headers={"Content-Type": "application/json"}, timeout=20 * SLOW)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_becomes_ids(shared: World, path: str) -> None:
    body = post(shared, path, prompt="hi!", model="toy").json()
    assert body == {"count": 3, "max_model_len": CONTEXT, "tokens": [104, 105, 33], "token_strs": None}
    assert post(shared, path, prompt="hi", return_token_strs=True).json()["token_strs"] == ["h", "i"]
    assert post(shared, path, prompt="").json()["tokens"] == []
    assert post(shared, path, prompt=["a", "bc"]).json() == {"count": [1, 2], "max_model_len": CONTEXT, "tokens": [[97], [98, 99]], "token_strs": None}
    assert post(shared, path, prompt="<eos>").json()["tokens"] == [EOS]


def test_messages_become_the_ids_that_a_chat_would_have(shared: World) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = post(shared, "/tokenize", messages=messages).json()["tokens"]
    assert bytes(ids) == b"user:hi\nassistant:"
    shared.engine.requests.clear()
    httpx.post(shared.url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}, timeout=20 * SLOW)
    assert shared.engine.requests[0].input_ids == ids
    assert bytes(post(shared, "/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]) == b"user:hi\nassistant:"


def test_a_text_longer_than_the_context_is_counted_all_the_same(shared: World) -> None:
    assert post(shared, "/tokenize", prompt="a" * 50_000).json()["count"] == 50_000


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_ids_become_text_again(shared: World, path: str) -> None:
    assert post(shared, path, tokens=[104, 105]).json() == {"prompt": "hi", "text": "hi"}
    assert post(shared, path, tokens=[]).json()["prompt"] == ""
    assert post(shared, path, tokens=[[104], [105, 33]]).json()["prompt"] == ["h", "i!"]
    assert post(shared, path, tokens=[104, EOS]).json()["prompt"] == "h<eos>"
    assert post(shared, path, tokens=[104, EOS], skip_special_tokens=True).json()["prompt"] == "h"
    text = "\u4e16\u754c \U0001f600"
    assert post(shared, path, tokens=list(text.encode())).json()["prompt"] == text
    assert post(shared, path, tokens=[97] * 20_000).json()["prompt"] == "a" * 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/tokenize", {"prompt": ["a"] * 257}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "alien", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "continue_final_message": 1}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
        ("/detokenize", {"tokens": [[1]] * 257}, "tokens"),
    ],
)
def test_what_cannot_be_is_named(shared: World, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(shared, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_another_model_is_refused(shared: World) -> None:
    assert post(shared, "/tokenize", prompt="a", model="x").json()["error"]["code"] == "model_not_found"


def test_both_answer_while_there_is_no_engine(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    world.control.publish(state="recovering", engine_up=False)
    assert post(world, "/tokenize", prompt="hi").status_code == 200
    assert post(world, "/detokenize", tokens=[104]).status_code == 200


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/server_info", "/get_server_info"])
def test_the_model_says_what_it_is(shared: World, path: str) -> None:
    body = httpx.get(shared.url + path, timeout=20 * SLOW).json()
    assert body["served_model_name"] == "toy" and body["is_generation"] is True
    assert body["weight_version"] == "toy@abc"
    assert (body["max_model_len"], body["max_total_num_tokens"], body["vocab_size"]) == (CONTEXT, 4096, 257)
    assert body["tokenizer_path"] == body["model_path"] == "toy"


def test_the_server_hides_its_paths(make_world: Callable[..., World]) -> None:
    world = make_world(api_keys_file="/etc/llmd/keys-of-all")
    assert world.control.ready.wait(20 * SLOW)
    answer = httpx.get(world.url + "/server_info", timeout=20 * SLOW)
    assert answer.status_code == 401, "its keys cannot be read, so nobody gets in"
    open_world = make_world(access_log_exclude=("/x",)).up()
    body = httpx.get(open_world.url + "/server_info", timeout=20 * SLOW).json()
    assert body["state"] == "ready"
    assert body["internal_states"][0].get("avg_spec_accept_length") is None, "what its load generator reads"
    assert body["configuration"]["http.max_body"] == 8 * 2**20
    assert body["configuration"]["http.api_keys_file"] is None
    assert str(open_world.dir) not in json.dumps(body)
