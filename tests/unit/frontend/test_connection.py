"""One connection: offers of other protocols, requests sent ahead, clients that go meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from llmd.frontend.exchange import TRANSPORT
from tests.daemon import SLOW

from .test_app import served, spoken, until

INNER = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
OFFERS = (
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    b"Connection: keep-alive\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: abc\r\n",
)


class Echo:
    """Answers with path and body, and remembers them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.seen.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


async def test_an_offer_of_another_protocol_loses_no_body_and_makes_no_request_of_it() -> None:
    echo = Echo()
    async with served(echo) as url:
        for offer in OFFERS:
            for tail in (b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER, b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)):
                head, _, body = tail.partition(b"\r\n\r\n")
                said = b"POST /outer?a=b HTTP/1.1\r\nHost: x\r\n" + offer + head + b"\r\n\r\n"
                for parts in ((said + body,), (said, body), (said + body[:7], body[7:])):
                    echo.seen.clear()
                    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    writer.write(b"GET /after HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    answer = await asyncio.wait_for(reader.read(), 20 * SLOW)
                    writer.close()
                    assert echo.seen == [("/outer", INNER), ("/after", b"")], (offer, parts)
                    assert answer.count(b"HTTP/1.1 200") == 2
        assert (await spoken(url, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + INNER)).startswith(b"HTTP/1.1 400")


async def test_a_client_that_goes_is_noticed_also_with_requests_sent_ahead() -> None:
    paths: list[str] = []
    gone: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        paths.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.append(scope["path"])

    async with served(app) as url:
        for ahead in (b"", INNER, b"G", INNER + INNER):
            paths.clear()
            gone.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n" + ahead)
            await writer.drain()
            await until(lambda: bool(paths))
            writer.close()
            await until(lambda: bool(gone))
            assert (paths, gone) == (["/first"], ["/first"])


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    echo = Echo()
    async with served(echo) as url:
        said = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n%b\r\n" % (i, b"Connection: close\r\n" if i == 4 else b"") for i in range(5))
        assert (await spoken(url, said)).count(b"HTTP/1.1 200") == 5
        assert [path for path, _ in echo.seen] == [f"/{i}" for i in range(5)]


async def test_what_is_sent_ahead_is_not_read_before_its_turn() -> None:
    waiting: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        waiting.append(len(scope[TRANSPORT].pipeline))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    one_read = 256 * 1024 // len(INNER) + 2
    count = 4 * one_read
    async with served(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(INNER * count)
        for _ in range(count):
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert len(waiting) == count
    assert max(waiting) <= one_read
