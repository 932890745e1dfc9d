"""Answers with many logprobs are made beside the event loop, and are what they would be anyway."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from llmd.frontend.channels import TURN_S
from llmd.frontend.exchange import PIPE, Exchange
from llmd.frontend.making import INLINE_WEIGHT, Maker
from llmd.frontend.native.results import Growing, GrowingJson
from llmd.frontend.openai.logprobs import chat_logprobs
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.stream import Stream, Streams
from llmd.wire.messages import Finish, SamplingParams, TextChunk, TokenizedGenerateReqInput, TokenLogprob

TOP = tuple((id, -float(id)) for id in range(20))
NAMES = tuple(b"%d" % id for id in range(20))


def entry(i: int) -> TokenLogprob:
    return TokenLogprob(i, -1.0, TOP, b"t%d" % i, NAMES)


def generation(tokens: int, prompt: int, *, streamed: bool) -> Generation:
    made = Generation("r", streamed=streamed)
    request = TokenizedGenerateReqInput(
        rid="r", frontend=0, epoch=1, input_ids=[1] * prompt, sampling=SamplingParams(max_new_tokens=tokens), logprobs=20, prompt_logprobs=True
    )
    state = made.add(request)
    for i in range(tokens):
        finish = Finish("length") if i == tokens - 1 else None
        prompts = [entry(k) for k in range(prompt)] if i == 0 else None
        state.put(TextChunk("r", i, "x", [i], finish, [entry(i)], prompts))
    return made


async def test_much_is_made_in_a_thread_and_little_is_not() -> None:
    maker, here = Maker(), threading.get_ident()
    seen: list[bool] = []

    def call() -> bytes:
        seen.append(threading.get_ident() == here)
        return b"x"

    assert (await maker.make(INLINE_WEIGHT, call), await maker.make(INLINE_WEIGHT + 1, call)) == (b"x", b"x")
    assert seen == [True, False]
    maker.close()


def test_what_waits_is_weighed_and_comes_back_whole() -> None:
    made = generation(300, 500, streamed=False)
    assert made.weight >= 800 * 21
    assert isinstance(made.choices[0]._prompt_logprobs, bytes), "as objects they are ten times as large"
    (delta,) = made.take()
    assert delta.prompt_logprobs == [entry(k) for k in range(500)]
    assert delta.logprobs == [entry(i) for i in range(300)]
    assert made.weight == 0


class Plain:
    """Notes in which thread it is asked, and what for."""

    stream = True

    def __init__(self) -> None:
        self.usage = Usage([1], 1)
        self.threads: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        self.threads.add(threading.get_ident())
        return delta.text.encode()

    def closing(self) -> bytes:
        return b"|"


class Pipe:
    paused = False

    def __init__(self, sent: list[bytes]) -> None:
        self.write = sent.append


async def test_a_stream_whose_client_asks_for_much_is_whole_and_in_order() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    answer, streams = Plain(), Streams()
    stream = Stream(streams, {PIPE: Pipe(sent)}, send, Exchange(), generation(300, 500, streamed=True), answer, ping=9, patience=9)  # type: ignore[arg-type]
    await asyncio.wait_for(stream.run(), 20)
    assert b"".join(sent) == b"x" * 300 + b"|data: [DONE]\n\n"
    assert answer.threads - {threading.get_ident()}
    streams.maker.close()


async def test_pushes_take_turns_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, order = Streams(), list[str]()

    class Slow:
        def push(self) -> None:
            order.append("push")

    now = iter(range(1000))
    monkeypatch.setattr("llmd.frontend.stream.time.perf_counter", lambda: float(next(now)))
    for _ in range(3):
        streams.announce(Slow())  # type: ignore[arg-type]
    asyncio.get_running_loop().call_soon(order.append, "other")
    for _ in range(4):
        await asyncio.sleep(0)
    assert order == ["push", "other", "push", "push"]
    assert 0 < TURN_S < 1


def test_lists_that_grow_show_the_same_as_objects_and_as_json() -> None:
    plain, encoded = Growing(), GrowingJson()
    for items in ([], [(None, 1, "a")], [(-1.5, 2, None), None]):
        plain.extend(items)
        encoded.extend(items)
        assert json.loads(dumps({"x": encoded.shown()}))["x"] == json.loads(dumps(plain.shown()))


def test_chat_logprobs_are_what_they_say() -> None:
    content = json.loads(dumps(chat_logprobs([entry(5)], 2)))["content"]
    assert content == [
        {
            "token": "t5",
            "logprob": -1.0,
            "bytes": [116, 53],
            "top_logprobs": [{"token": "0", "logprob": 0.0, "bytes": [48]}, {"token": "1", "logprob": -1.0, "bytes": [49]}],
        }
    ]
