"""/generate as SGLang's clients speak it: shapes of requests, answers, events and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from llmd.wire.messages import AbortReq, TokenizedGenerateReqInput
from tests.daemon import SLOW

from .conftest import CONTEXT, World, wait_for


def generate(world: World, **body: Any) -> httpx.Response:
    return httpx.post(world.url + "/generate", json=body, timeout=20 * SLOW)


def events(world: World, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which has to end with [DONE]."""
    with httpx.stream("POST", world.url + "/generate", json={**body, "stream": True}, timeout=20 * SLOW) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refusal(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    return str(error["message"])


def test_one_prompt_is_answered_by_one_object(shared: World) -> None:
    answer = generate(shared, text="abc", sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert answer.status_code == 200
    body = answer.json()
    meta = body["meta_info"]
    assert body["text"] == "abcab"
    assert body["output_ids"] == list(b"abcab")
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": answer.headers["x-llmd-rid"],
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 3,
        "weight_version": "toy@abc",
    }


def test_without_sampling_params_the_defaults_of_sglang_hold(shared: World) -> None:
    assert generate(shared, text="a", sampling_params=None).status_code == 200
    sampling = shared.engine.requests[-1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (128, 1.0, 1.0, -1)


def test_token_ids_are_taken_as_they_are(shared: World) -> None:
    body = generate(shared, input_ids=[104, 105], sampling_params={"max_new_tokens": 4}).json()
    assert body["text"] == "hihi"
    assert body["meta_info"]["prompt_tokens"] == 2


def test_a_batch_is_answered_by_a_list_each_with_its_own_parameters(shared: World) -> None:
    answer = generate(shared, text=["ab", "xyz"], sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 4, "n": 2}], rid=["one", "two"])
    bodies = answer.json()
    assert [body["text"] for body in bodies] == ["ab", "xyzx", "xyzx"]
    assert [body["meta_info"]["id"] for body in bodies] == ["one", "two_0", "two_1"]
    assert generate(shared, text=["ab"], sampling_params={"max_new_tokens": 2}).json()[0]["text"] == "ab"
    assert [body["text"] for body in generate(shared, input_ids=[[97], [98]], sampling_params={"max_new_tokens": 1}).json()] == ["a", "b"]


def test_events_hold_all_there_is_so_far(shared: World) -> None:
    found = events(shared, text="abc", sampling_params={"max_new_tokens": 4})
    texts = [event["text"] for event in found]
    assert texts[-1] == "abca"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert all(len(event["output_ids"]) == event["meta_info"]["completion_tokens"] for event in found)
    assert "index" not in found[0]


def test_events_of_a_batch_say_which_prompt_they_are_of(shared: World) -> None:
    last = {event["index"]: event["text"] for event in events(shared, text=["ab", "xyz"], sampling_params={"max_new_tokens": 3})}
    assert last == {0: "aba", 1: "xyz"}


def test_logprobs_of_output_and_prompt(shared: World) -> None:
    params = {"max_new_tokens": 2}
    meta = generate(
        shared, text="abc", sampling_params=params, return_logprob=True, logprob_start_len=1, top_logprobs_num=2, return_text_in_logprobs=True
    ).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["input_token_logprobs"] == [[-1.0, 98, "b"], [-1.0, 99, "c"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-2.0, 65, "A"]]
    assert len(meta["input_top_logprobs"]) == 2
    plain = generate(shared, text="abc", sampling_params=params, return_logprob=True).json()["meta_info"]
    assert plain["output_token_logprobs"] == [[-0.5, 97, None], [-0.5, 98, None]]
    assert plain["input_token_logprobs"] == []
    assert "output_token_logprobs" not in generate(shared, text="abc", sampling_params=params).json()["meta_info"]


def test_nothing_may_be_generated_and_the_prompt_is_scored(shared: World) -> None:
    body = generate(shared, text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0).json()
    assert (body["text"], body["output_ids"]) == ("", [])
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 0)
    assert meta["input_token_logprobs"] == [[None, 97, None], [-1.0, 98, None], [-1.0, 99, None]]
    assert meta["output_token_logprobs"] == []
    plain = generate(shared, text="abc", sampling_params={"max_new_tokens": 0}).json()
    assert plain["text"] == "" and "input_token_logprobs" not in plain["meta_info"]
    (event,) = events(shared, text="abc", sampling_params={"max_new_tokens": 0})
    assert event["text"] == "" and event["meta_info"]["finish_reason"]["type"] == "length"


def test_sampling_params_say_what_becomes_of_the_tokens(shared: World) -> None:
    for name in ("no_stop_trim", "include_stop_str_in_output"):
        for value in (True, False, None):
            assert generate(shared, text="a", sampling_params={"max_new_tokens": 1, "stop": "zz", name: value}).status_code == 200
            assert shared.engine.requests[-1].detokenize.include_stop is (value is True)
    for value in (True, False, None):
        assert generate(shared, text="a", sampling_params={"max_new_tokens": 1, "spaces_between_special_tokens": value}).status_code == 200
    assert generate(shared, text="a", sampling_params={"max_new_tokens": 3, "min_new_tokens": 2, "stop": "zz"}).status_code == 200
    assert shared.engine.requests[-1].detokenize.min_tokens == shared.engine.requests[-1].sampling.min_new_tokens == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 5]}, "text[1]"),
        ({"text": ""}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": ["a"] * 257}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [[1], [True]]}, "input_ids[1]"),
        ({"input_ids": [[]]}, "input_ids[0]"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "sampling_params.min_new_tokens"),
        ({"text": ["a"], "sampling_params": [{"temperature": -1}]}, "sampling_params[0].temperature"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"no_such": 1}}, "sampling_params.no_such"),
        ({"text": ["a"] * 200, "sampling_params": {"n": 2}}, "sampling_params"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": "x"}, "logprob_start_len"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "priority": 1.5}, "priority"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": "http://h/x.png"}, "image_data"),
        ({"text": "a", "rid": 7}, "rid"),
        ({"text": "a", "rid": "x" * 129}, "rid"),
        ({"text": "a", "rid": "a\nb"}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ],
)
def test_what_cannot_be_is_named(shared: World, body: dict[str, Any], param: str) -> None:
    before = len(shared.engine.requests)
    text = json.dumps(body)  # lone surrogates travel as escapes
    answer = httpx.post(shared.url + "/generate", content=text, headers={"Content-Type": "application/json"}, timeout=20 * SLOW)
    refusal(answer, 400, param)
    assert len(shared.engine.requests) == before


def test_a_prompt_too_long_is_refused_before_any_event(shared: World) -> None:
    body = {"input_ids": [65] * (CONTEXT + 1), "stream": True}
    refusal(generate(shared, **body), 400, "input_ids", "context_length_exceeded")
    refusal(generate(shared, text=["a", "b" * (CONTEXT + 1)]), 400, "text[1]", "context_length_exceeded")
    wish = {"text": "abc", "sampling_params": {"max_new_tokens": CONTEXT}}
    refusal(generate(shared, **wish), 400, "sampling_params.max_new_tokens", "context_length_exceeded")
    long = generate(shared, text="a" * (CONTEXT - 3))
    assert long.json()["meta_info"]["completion_tokens"] == 3, "a default that does not fit is shortened"


def test_fields_without_meaning_here_are_taken_at_their_neutral_value(shared: World) -> None:
    body = {"lora_path": "", "return_routed_experts": False, "return_hidden_states": False, "image_data": None, "modalities": [], "log_metrics": True}
    assert generate(shared, text="a", sampling_params={"max_new_tokens": 1}, **body).status_code == 200


def test_a_name_that_runs_already_is_a_conflict(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    world.engine.script = lambda request: None
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(generate(world, text="abc", rid="mine", sampling_params={"max_new_tokens": 2})))
    thread.start()
    try:
        wait_for(lambda: len(world.engine.requests) == 1, 10)
        refusal(generate(world, text="abc", rid="mine"), 409, "rid", "duplicate_request_id")
        refusal(generate(world, text=["a", "b"], rid=["other", "mine"]), 409, "rid", "duplicate_request_id")
        refusal(generate(world, text=["a", "b"], rid=["twice", "twice"]), 409, "rid", "duplicate_request_id")
        assert world.control.command("abort", rid="mine").data["aborted"] == [world.engine.requests[0].rid]
    finally:
        world.engine.stop()
        thread.join(10)
    refusal(first[0], 409, None, "aborted")


def test_a_name_is_free_again_when_its_request_is_over(shared: World) -> None:
    for _ in range(2):
        answer = generate(shared, text="abc", rid="again", sampling_params={"max_new_tokens": 2})
        assert answer.json()["meta_info"]["id"] == "again"
        assert answer.headers["x-llmd-rid"].startswith("again.")


def test_an_error_of_the_engine_is_a_status_or_one_event(make_world: Callable[..., World]) -> None:
    world = make_world().up()

    def refuse(request: TokenizedGenerateReqInput) -> AbortReq:
        return AbortReq(rid=request.rid, epoch=1, code="queue_full", message="512 requests are waiting already")

    world.engine.script = refuse
    answer = generate(world, text="a", stream=True)
    refusal(answer, 429, None, "queue_full")
    assert answer.headers["retry-after"] == "1"


def test_it_is_counted_like_the_other_endpoints(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    generate(world, text="abc", sampling_params={"max_new_tokens": 2})
    generate(world, text="")
    name = 'llmd_requests_total{endpoint="/generate",outcome="%s"}'
    wait_for(lambda: world.control.counter(name % "length") == world.control.counter(name % "invalid") == 1, 5)
    assert world.control.counter("llmd_prompt_tokens_total") == 3
    assert world.control.counter("llmd_generation_tokens_total") == 2
