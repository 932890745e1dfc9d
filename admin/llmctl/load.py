"""A load generator for any server that speaks OpenAI's completions: `run` keeps some streams busy and measures what comes back.

It shares the machine with the server as often as not, so it does little itself: asyncio's own sockets, no JSON but of the last event.
Prompts are random common words, each about one token for usual tokenizers; what the server counted stands in the result.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

_VOCABULARY: Final = (
    "water house light morning river stone garden window letter winter bridge paper table music road field horse mountain summer evening village market "
    "bread forest island harbor engine teacher farmer captain doctor sister brother mother father friend story picture number color corner season weather"
)
_WORDS: Final = _VOCABULARY.split()
#: Longest line of a response that is taken; logprobs are not asked for.
_LINE: Final = 1 << 20
#: Seconds in which a server has to take a connection.
CONNECT_WITHIN: Final = 10.0


class LoadError(Exception):
    """The server refused a request or broke off; the message says which. `status`: of its answer, 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BadAddress(LoadError):
    """The URL is not one of an HTTP server."""


class Unreachable(LoadError):
    """No connection came about. The message begins with `HOST:PORT`."""


@dataclass(frozen=True)
class Work:
    """What each request looks like. Lengths in tokens (prompts: in words)."""

    input_len: int = 128
    output_len: int = 128
    shared_len: int = 0
    """The first words of every prompt that are the same for all."""


#: Names for the usual ones.
WORKS: Final = {"short": Work(128, 128), "shared": Work(1056, 64, 1024), "long": Work(1500, 16)}


@dataclass(frozen=True)
class Target:
    """A server. `url`: as far as the host and port, or with a path such as `/v1`."""

    url: str
    model: str
    key: str = ""


@dataclass
class Sample:
    """One request: seconds since it was sent."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Result:
    """All requests of one run."""

    streams: int
    seconds: float
    samples: list[Sample]

    @property
    def output_tokens_s(self) -> float:
        return sum(s.output_tokens for s in self.samples) / self.seconds

    @property
    def prompt_tokens_s(self) -> float:
        return sum(s.prompt_tokens for s in self.samples) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [s.error for s in self.samples if s.error]

    def first(self, share: float) -> float:
        """Seconds to the first token: a percentile."""
        return percentile([s.first for s in self.samples if s.first], share)

    def gap(self, share: float) -> float:
        """Seconds between two tokens: a percentile."""
        return percentile([gap for s in self.samples for gap in s.gaps], share)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def prompts(work: Work, count: int, seed: int) -> list[str]:
    """`count` prompts that are the same for the same seed."""
    dice = random.Random(seed)
    head = random.Random(0).choices(_WORDS, k=work.shared_len)
    return [" ".join(head + dice.choices(_WORDS, k=work.input_len - len(head))) for _ in range(count)]


async def run(target: Target, work: Work, texts: Sequence[str], streams: int) -> Result:
    """Send `texts`, at most `streams` at a time. A request that fails is a sample with an error."""
    left = iter(texts)
    samples: list[Sample] = []

    async def stream() -> None:
        connection = _Connection(target)
        try:
            for text in left:
                samples.append(await _one(connection, target, work, text))
        finally:
            connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(min(streams, len(texts)))))
    return Result(streams, time.perf_counter() - began, samples)


async def reach(target: Target) -> None:
    """Return if somebody takes connections there. Raises LoadError, BadAddress, Unreachable; TimeoutError after CONNECT_WITHIN."""
    connection = _Connection(target)
    try:
        async with asyncio.timeout(CONNECT_WITHIN):
            await connection.open()
    finally:
        connection.close()


async def models(target: Target) -> list[str]:
    """The ids that the server serves. Raises LoadError."""
    connection = _Connection(target)
    try:
        status, body = await connection.whole("GET", "/models", b"")
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise LoadError(f"{target.url}: {error}") from None
    finally:
        connection.close()
    if status != 200:
        raise LoadError(f"{target.url}: HTTP {status}: {body[:200].decode(errors='replace')}", status)
    return [str(model["id"]) for model in json.loads(body)["data"]]


async def _one(connection: _Connection, target: Target, work: Work, text: str) -> Sample:
    body = {
        "model": target.model,
        "prompt": text,
        "max_tokens": work.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample()
    try:
        await _stream(connection, json.dumps(body).encode(), sample)
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError, LoadError) as error:
        sample.error = str(error) or type(error).__name__
        connection.close()
    return sample


async def _stream(connection: _Connection, body: bytes, sample: Sample) -> None:
    began = last = time.perf_counter()
    await connection.send("POST", "/completions", body)
    status = await connection.head()
    if status != 200:
        raise LoadError(f"HTTP {status}: {(await connection.rest())[:200].decode(errors='replace')}")
    events: list[bytes] = []
    rest = b""
    async for piece in connection.chunks():
        *lines, rest = (rest + piece).split(b"\n")
        fresh = [line[6:].rstrip() for line in lines if line.startswith(b"data: ")]
        if not fresh:
            continue
        now = time.perf_counter()
        if not events:
            sample.first = now - began
        elif fresh != [b"[DONE]"]:
            sample.gaps.append(now - last)
        last = now
        events += fresh
    sample.total = last - began
    _read(events, sample)


def _read(events: list[bytes], sample: Sample) -> None:
    """Texts and counts. Done when the request is over, so that it costs the other streams little."""
    if not events or events[-1] != b"[DONE]":
        raise LoadError("the stream ended without [DONE]")
    texts = []
    for line in events[:-1]:
        event = json.loads(line)
        if "error" in event:
            raise LoadError(str(event["error"].get("message", event["error"])))
        texts += [choice.get("text") or "" for choice in event.get("choices") or ()]
        usage = event.get("usage")
        if usage:
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    sample.text = "".join(texts)


class _Connection:
    """One HTTP/1.1 connection, kept alive; a closed one is opened again by the next request."""

    def __init__(self, target: Target) -> None:
        try:
            parts = urlsplit(target.url if "://" in target.url else f"http://{target.url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise BadAddress(f"not an HTTP address: {target.url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") or "/v1"
        self._key = target.key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._chunked = False
        self._length = 0

    async def open(self) -> asyncio.StreamWriter:
        """Connect, if it is not connected. Raises Unreachable; LoadError where TLS fails."""
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LINE)
            except ssl.SSLError as error:
                raise LoadError(f"{self._host}:{self._port}: TLS: {error.reason}") from None
            except OSError as error:
                raise Unreachable(f"{self._host}:{self._port}: {_why(error)}") from None
        return self._streams[1]

    async def send(self, method: str, path: str, body: bytes) -> None:
        writer = await self.open()
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self._key:
            head += f"Authorization: Bearer {self._key}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()

    async def head(self) -> int:
        """Read the status line and the headers."""
        reader = self._reader
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        self._chunked, self._length = False, 0
        while (line := (await reader.readuntil(b"\r\n")).strip().lower()) != b"":
            if line.startswith(b"transfer-encoding:"):
                self._chunked = b"chunked" in line
            elif line.startswith(b"content-length:"):
                self._length = int(line.split(b":")[1])
        return status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        reader = self._reader
        if not self._chunked:
            yield await reader.readexactly(self._length)
            return
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")

    async def rest(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    async def whole(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a short answer."""
        await self.send(method, path, body)
        return await self.head(), await self.rest()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    @property
    def _reader(self) -> asyncio.StreamReader:
        assert self._streams is not None
        return self._streams[0]


def _why(error: OSError) -> str:
    """In the system's words: asyncio's own hold the address once more."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
