"""The load generator against a server of the tests' own, which cuts its answers into odd pieces."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable

import pytest

from llmctl import load
from llmctl.load import LoadError, Target, Work

Pieces = Callable[[dict[str, object]], AsyncIterator[bytes]]


async def _served(pieces: Pieces, work: Work, texts: list[str], streams: int, *, status: str = "200 OK") -> tuple[load.Result, list[str]]:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                heads.append(head)
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
                async for piece in pieces(body):
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await load.run(Target(f"http://127.0.0.1:{port}/v1", "m", "secret"), work, texts, streams), heads


def _events(count: int) -> bytes:
    events = [{"choices": [{"text": f"{number} "}]} for number in range(count)]
    events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


async def _in_odd_pieces(body: dict[str, object]) -> AsyncIterator[bytes]:
    whole = b": a comment\n\n" + _events(int(str(body["max_tokens"])))
    for start in range(0, len(whole), 17):
        yield whole[start : start + 17]
        await asyncio.sleep(0)


async def test_it_counts_what_comes_however_it_is_cut() -> None:
    work = Work(input_len=3, output_len=5)
    result, heads = await _served(_in_odd_pieces, work, load.prompts(work, 7, seed=1), streams=3)
    assert not result.errors and len(result.samples) == 7
    assert {s.text for s in result.samples} == {"0 1 2 3 4 "}
    assert {(s.prompt_tokens, s.output_tokens) for s in result.samples} == {(7, 5)}
    assert result.output_tokens_s * result.seconds == pytest.approx(35)
    assert all(len(s.gaps) >= 4 and 0 < s.first <= s.total for s in result.samples)
    assert all("POST /v1/completions " in head and "Authorization: Bearer secret" in head for head in heads)


async def _error_event(body: dict[str, object]) -> AsyncIterator[bytes]:
    yield b'data: {"choices":[{"text":"x"}]}\n\ndata: {"error":{"message":"engine lost"}}\n\ndata: [DONE]\n\n'


async def _cut_short(body: dict[str, object]) -> AsyncIterator[bytes]:
    yield b'data: {"choices":[{"text":"x"}]}\n\n'


async def _refusal(body: dict[str, object]) -> AsyncIterator[bytes]:
    yield b'{"error":{"message":"no such model"}}'


@pytest.mark.parametrize(
    ("pieces", "status", "error"),
    [(_error_event, "200 OK", "engine lost"), (_cut_short, "200 OK", "without \\[DONE\\]"), (_refusal, "404 Not Found", "HTTP 404: .*no such model")],
)
async def test_a_request_that_fails_is_a_sample_with_the_reason(pieces: Pieces, status: str, error: str) -> None:
    result, _ = await _served(pieces, Work(3, 5), ["a", "b"], 1, status=status)
    assert len(result.errors) == 2
    assert re.search(error, result.errors[1])


async def test_a_server_that_is_not_there() -> None:
    result = await load.run(Target("http://127.0.0.1:9", "m"), Work(), ["a"], 1)
    assert len(result.errors) == 1
    with pytest.raises(LoadError, match=r"127\.0\.0\.1:9"):
        await load.models(Target("http://127.0.0.1:9", "m"))
    with pytest.raises(LoadError, match="not an HTTP address"):
        await load.models(Target("ftp://x", "m"))


def test_prompts_differ_but_for_what_they_share_and_repeat_with_the_seed() -> None:
    work = Work(input_len=40, output_len=1, shared_len=30)
    texts = load.prompts(work, 20, seed=4)
    assert len(set(texts)) == 20 and texts == load.prompts(work, 20, seed=4) != load.prompts(work, 20, seed=5)
    assert len({" ".join(text.split()[:30]) for text in texts + load.prompts(work, 3, seed=5)}) == 1
    assert {len(text.split()) for text in texts} == {40}


def test_percentiles() -> None:
    assert load.percentile([], 0.5) == 0
    assert [load.percentile([3, 1, 2, 4], share) for share in (0.0, 0.5, 0.99)] == [1, 3, 4]
