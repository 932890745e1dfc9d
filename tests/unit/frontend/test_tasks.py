"""Requests that end well, badly or not at all leave no task behind in the event loop."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from llmd.frontend.access_log import AccessLog
from llmd.frontend.app import create_app
from llmd.frontend.engine_view import EngineView
from llmd.frontend.runtime import Runtime
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter
from llmd.wire.messages import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    Embedding,
    Finish,
    TextChunk,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from .test_app import nothing, served
from .test_openapi import equip
from .test_state import BOOT

TOKENS = 6


class EchoPort:
    """An engine that says one character every few milliseconds."""

    epoch = 1
    manager: TokenizerManager

    def open(self, epoch: int) -> None: ...

    def send(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, TokenizedEmbeddingReqInput):
            loop.call_later(0.003, self.say, BatchEmbeddingOutput(epoch=1, embeddings=[Embedding(message.rid, b"\0\0\x80\x3f")]))
        if isinstance(message, TokenizedGenerateReqInput):
            for i in range(TOKENS):
                chunk = TextChunk(message.rid, i, "a", [0], Finish("length") if i == TOKENS - 1 else None, at=i)
                loop.call_later(0.002 * (i + 1), self.say, BatchStrOutput(epoch=1, chunks=[chunk]))

    def say(self, message: Any) -> None:
        self.manager.flights.receive(message)


def make_runtime(tmp_path: Path) -> Runtime:
    view, meter, port = EngineView(BOOT, restarted=False), Meter(), EchoPort()
    port.manager = TokenizerManager(0, view, port, meter)  # type: ignore[arg-type]
    return Runtime(BOOT, view, port.manager, meter, AccessLog(tmp_path / "access.log", role="f", exclude=("/",), as_json=True))


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": TOKENS, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": TOKENS, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}], "max_tokens": TOKENS, "stream": True}),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": TOKENS}, "stream": True, "rid": "twice"}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/tokenize", {"prompt": "a b"}),
    ("/v1/completions", {"prompt": 5}),
    ("/nowhere", {}),
]


async def one(port: int, dice: random.Random) -> None:
    path, body = dice.choice(BODIES)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    way = dice.randrange(5)
    writer.write(head + data[: 1 if way == 0 else len(data)])
    if way < 2:
        await asyncio.sleep(dice.random() * 0.02)
        writer.transport.abort()  # type: ignore[attr-defined]
        return
    await asyncio.wait_for(reader.read(200 if way == 2 else -1), 60)
    writer.close()


async def settled(runtime: Runtime, most: int) -> int:
    """Wait until nothing is in flight and no more than `most` tasks are there; returns how many are."""
    deadline = asyncio.get_running_loop().time() + 60
    while len(tasks := asyncio.all_tasks()) > most or runtime.manager.inflight or runtime.manager.in_flight():
        assert asyncio.get_running_loop().time() < deadline, tasks
        await asyncio.sleep(0.02)
    return len(tasks)


async def test_no_task_outlives_its_request(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path)
    equip(runtime)
    async with served(create_app(runtime, nothing())) as url:
        port, dice = int(url.rsplit(":", 1)[1]), random.Random(4)
        await one(port, dice)
        usual = await settled(runtime, 1000)
        for _ in range(30):
            await asyncio.gather(*(one(port, dice) for _ in range(8)))
        await settled(runtime, usual)
        assert runtime.manager.inflight == 0
    assert sum(runtime.meter.snapshot().counters.values()) > 0
    runtime.manager.executor.shutdown()
