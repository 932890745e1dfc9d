"""/v1/embeddings as OpenAI's clients speak it: every kind of input, both encodings, errors by name."""

from __future__ import annotations

import base64
import http.client
import json
import struct
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from llmd.wire.messages import AbortReq, TokenizedEmbeddingReqInput
from tests.daemon import SLOW

from .conftest import CONTEXT, World, wait_for


def embed(world: World, **body: Any) -> httpx.Response:
    text = json.dumps(body)  # lone surrogates travel as escapes
    return httpx.post(world.url + "/v1/embeddings", content=text, headers={"Content-Type": "application/json"}, timeout=20 * SLOW)


def test_a_text_becomes_a_vector(shared: World) -> None:
    answer = embed(shared, input="abc", model="toy")
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [97.0, 99.0]}],
        "model": "toy",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert answer.headers["x-llmd-rid"].startswith("embd-")
    assert shared.engine.requests[-1].rid == answer.headers["x-llmd-rid"]


@pytest.mark.parametrize(
    ("given", "vectors", "tokens"),
    [
        ("xy", [[120, 121]], 2),
        (["a", "bc"], [[97, 97], [98, 99]], 3),
        ([100, 101, 102], [[100, 102]], 3),
        ([[100, 101], [5], [256]], [[100, 101], [5, 5], [256, 256]], 4),
    ],
)
def test_texts_ids_and_lists_of_either(shared: World, given: Any, vectors: list[list[float]], tokens: int) -> None:
    body = embed(shared, input=given).json()
    assert [entry["embedding"] for entry in body["data"]] == vectors
    assert [entry["index"] for entry in body["data"]] == list(range(len(vectors)))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_is_float32_little_endian(shared: World) -> None:
    (entry,) = embed(shared, input="ab", encoding_format="base64").json()["data"]
    assert struct.unpack("<2f", base64.b64decode(entry["embedding"], validate=True)) == (97.0, 98.0)


def test_the_official_client_gets_the_same_either_way(shared: World) -> None:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="x", max_retries=0) as client:
        default = client.embeddings.create(model="toy", input=["ab", "c"])  # base64 on the wire
        plain = client.embeddings.create(model="toy", input=["ab", "c"], encoding_format="float")
        assert [entry.embedding for entry in default.data] == [entry.embedding for entry in plain.data] == [[97.0, 98.0], [99.0, 99.0]]
        assert default.usage.prompt_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="toy", input="")
        assert caught.value.param == "input"


def test_dimensions_go_to_the_engine_and_more_than_there_are_is_an_error(shared: World) -> None:
    body = embed(shared, input="abc", dimensions=1).json()
    assert body["data"][0]["embedding"] == [97.0]
    answer = embed(shared, input="abc", dimensions=3)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "dimensions"
    assert "at most 2" in answer.json()["error"]["message"]


def test_null_is_the_default(shared: World) -> None:
    body = {"model": None, "encoding_format": None, "dimensions": None, "user": None, "priority": None}
    assert embed(shared, input="ab", **body).json() == embed(shared, input="ab").json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [300]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "model": 5}, "model"),
    ],
)
def test_what_cannot_be_is_named(shared: World, body: dict[str, Any], param: str) -> None:
    before = len(shared.engine.requests)
    answer = embed(shared, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(shared.engine.requests) == before


def test_a_text_too_long_is_named_and_one_that_just_fits_is_not(shared: World) -> None:
    answer = embed(shared, input=["a", "b" * (CONTEXT + 1)])
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "context_length_exceeded", "input[1]")
    answer = embed(shared, input=[[65] * (CONTEXT + 1)])
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "context_length_exceeded", "input[0]")
    assert embed(shared, input="b" * CONTEXT).status_code == 200
    assert embed(shared, input="a", model="other").json()["error"]["code"] == "model_not_found"


def test_a_refusal_of_the_engine_is_the_answer(make_world: Callable[..., World]) -> None:
    world = make_world().up()

    def refuse(message: TokenizedEmbeddingReqInput) -> None:
        world.engine.say(AbortReq(rid=message.rid, epoch=1, code="queue_timeout", message="the request has waited for 60 s"))

    world.engine.embed = refuse  # type: ignore[method-assign]
    answer = embed(world, input=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    assert "retry-after" in answer.headers


def test_a_list_longer_than_the_queue_goes_to_the_engine_in_pieces(make_world: Callable[..., World]) -> None:
    world = make_world(scheduler={"max_queued_requests": 8}).up()
    embed_at_once, waiting, refused, last = world.engine.embed, [], [], []

    def embed_slowly(message: TokenizedEmbeddingReqInput) -> None:
        """Three at a time find room; the next one is refused, and makes room."""
        last.extend([1] if message.rid.endswith("-2047") else [])
        waiting.append(message)
        if len(waiting) > 3:
            refused.append(waiting.pop().rid)
            world.engine.say(AbortReq(rid=message.rid, epoch=1, code="queue_full", message="8 requests are waiting already"))
        elif not last:
            return
        while waiting:
            embed_at_once(waiting.pop(0))

    world.engine.embed = embed_slowly  # type: ignore[method-assign]
    texts = [[n % 256, (n * 7) % 256] for n in range(2048)]
    answer = embed(world, input=texts)
    assert answer.status_code == 200, answer.text
    assert [entry["embedding"] for entry in answer.json()["data"]] == texts
    assert len(world.engine.requests) == 2048 + len(refused) > 2048


def test_a_list_of_which_nothing_finds_room_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world(scheduler={"max_queued_requests": 8}).up()

    def refuse(message: TokenizedEmbeddingReqInput) -> None:
        world.engine.say(AbortReq(rid=message.rid, epoch=1, code="queue_full", message="8 requests are waiting already"))

    world.engine.embed = refuse  # type: ignore[method-assign]
    answer = embed(world, input=["a"] * 100)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert len(world.engine.requests) <= 8


def test_vectors_of_two_weights_are_never_in_one_answer(make_world: Callable[..., World]) -> None:
    world = make_world(scheduler={"max_queued_requests": 8}).up()
    embed_at_once = world.engine.embed
    world.engine.embed = lambda message: embed_at_once(message) if len(world.engine.requests) == 1 else None  # type: ignore[method-assign]
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(embed(world, input=["ab"] * 100)))
    thread.start()
    try:
        wait_for(lambda: len(world.engine.requests) == 5, 10)
        world.control.publish(state="reloading", engine_up=False)
        world.new_engine(2)
        world.control.publish(state="ready", engine_up=True, epoch=2, weights_version="other")
    finally:
        thread.join(20 * SLOW)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "reloaded")


def test_who_hangs_up_ends_the_request(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    world.engine.embed = lambda message: None  # type: ignore[method-assign]
    leaving = http.client.HTTPConnection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), timeout=10 * SLOW)
    leaving.request("POST", "/v1/embeddings", json.dumps({"input": ["a", "b"]}))
    wait_for(lambda: len(world.engine.requests) == 2, 10)
    leaving.close()
    wait_for(lambda: {abort.rid for abort in world.engine.aborts} == {request.rid for request in world.engine.requests} != set(), 10)
    wait_for(lambda: world.outcomes().get("client_disconnect") == 1, 10)


def test_a_new_engine_gets_the_texts_that_the_last_one_had(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    world.engine.embed = lambda message: None  # type: ignore[method-assign]
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(embed(world, input=["ab", "cd"])))
    thread.start()
    try:
        wait_for(lambda: len(world.engine.requests) == 2, 10)
        world.control.publish(state="recovering", engine_up=False)
        world.new_engine(2)
        world.control.publish(state="ready", engine_up=True, epoch=2)
    finally:
        thread.join(20 * SLOW)
    assert [entry["embedding"] for entry in answers[0].json()["data"]] == [[97.0, 98.0], [99.0, 100.0]]


def test_it_is_counted_as_done_without_generating(make_world: Callable[..., World]) -> None:
    world = make_world().up()
    embed(world, input="abc")
    name = 'llmd_requests_total{endpoint="/v1/embeddings",outcome="ok"}'
    wait_for(lambda: world.control.counter(name) == 1, 5)
    assert world.control.counter("llmd_prompt_tokens_total") == 3
    assert world.control.counter("llmd_generation_tokens_total") == 0
    wait_for(lambda: any(line["path"] == "/v1/embeddings" for line in world.access_lines()), 5)
    (line,) = [line for line in world.access_lines() if line["path"] == "/v1/embeddings"]
    assert (line["prompt_tokens"], line["completion_tokens"], line["outcome"]) == (3, 0, "ok")
