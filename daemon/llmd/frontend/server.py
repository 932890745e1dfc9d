"""uvicorn as the frontend needs it: its protocol reachable from the request, its signals ours, its own errors in the envelope."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Generator, MutableMapping, Sized
from http import HTTPStatus
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmd.errors import RequestError
from llmd.frontend.accepting import Acceptor, Board
from llmd.frontend.exchange import FAULT, PIPE, TRANSPORT
from llmd.frontend.replies import error_body
from llmd.frontend.turning import until_tick
from llmd.frontend.upgrades import without_offer

#: Bytes of one request's headers at most; the parser itself has no limit.
MAX_HEADER_BYTES = 64 * 1024
#: Seconds for a new connection's, or a begun request's, headers.
HEADERS_S = 30.0
#: Send buffer of a connection: small, so that the kernel does not hide a client that has stopped reading.
SEND_BUFFER = 128 * 1024
#: Seconds that a client which has ended its half of the connection gets to take an answer that is nearly there. A client that has
#: hung up looks the same until something is written to it, and must not go on costing tokens.
HALF_CLOSED_S = 0.5
#: Seconds between looks at whether a client that has sent requests ahead is still there.
LOOK_S = 0.5
#: States of a TCP connection (Linux, tcp_states.h) whose other end has sent its last: CLOSE, CLOSE_WAIT, LAST_ACK.
_ENDED: Final = (7, 8, 9)
#: Key in the ASGI scope of the response cycle of an HTTP/1.0 request, whose client knows no chunks.
_UNCHUNKED: Final = "llmd.unchunked"


class HeadHolder:
    """A connection's transport that can keep a response's head back until the body's first bytes go with it: one packet, one system call."""

    __slots__ = ("_hold", "_inner", "_kept", "write_through")

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner
        self._hold = False
        self._kept = b""
        self.write_through = inner.write
        """For bytes before which nothing is held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def hold(self) -> None:
        """Keep what is written next for the write after it."""
        self._hold = True

    def write(self, data: bytes) -> None:
        if self._hold:
            self._hold, self._kept = False, data
            return
        if self._kept:
            data, self._kept = self._kept + data, b""
        self.write_through(data)

    def close(self) -> None:
        self._hold = False
        if self._kept:
            self.write(b"")
        self._inner.close()


class BodyPipe:
    """The way of a begun response's body to its client past ASGI: a message through all layers costs more than a token."""

    __slots__ = ("_closing", "_cycle", "_file", "_flow", "_unsent", "_write")

    def __init__(self, cycle: Any) -> None:
        transport = cycle.transport
        self._cycle = cycle
        self._flow = cycle.flow
        self._closing = transport.is_closing
        self._unsent = transport.get_write_buffer_size
        self._write = transport.write_through
        self._file = transport.get_extra_info("socket").fileno()

    @property
    def paused(self) -> bool:
        """The client does not read, and what the transport buffers for it is enough."""
        return bool(self._flow.write_paused)

    async def drain(self) -> None:
        """Until it reads, or is gone."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """One piece of the body, not empty, and not the first. Sent at once where nothing waits before it: the transport would only do so in the
        event loop's next round."""
        cycle = self._cycle
        if cycle.disconnected or self._closing():
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if not self._unsent():
            try:
                data = data[os.write(self._file, data) :]
            except OSError:
                pass  # full or broken: the transport will see, and say so
            if not data:
                return
        self._write(data)


class OneAtATime(FlowControl):
    """Reads nothing while requests that have come wait for their turn: uvicorn reads on with each answer, and a client that sends many grows without bound."""

    def __init__(self, transport: Any, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _half_closed: asyncio.TimerHandle | None = None
    _refusal: RequestError | None = None
    """What is wrong with the bytes received, where it is not just that they are no request."""
    on_lost: Callable[[], None] | None = None
    """Called once the connection has ended."""
    _running: Any = None
    """The response cycle of the request that is being answered; `cycle` is that of the one that came last."""
    _look: asyncio.TimerHandle | None = None
    _arriving = False
    """Whether bytes of a request have come that the application knows nothing of yet."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(HeadHolder(transport))  # type: ignore[arg-type]
        self.flow = OneAtATime(self.transport, self.pipeline)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.cancel()
        for timer in (self._half_closed, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        if self.on_lost is not None:
            self.on_lost()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: closed at once, unless an answer to a whole request is due."""
        cycle = self._running
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        if self._half_closed is None:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, super().timeout_keep_alive_handler)
        return True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self.flow.resume_reading()
        super()._start_asgi_task(cycle, app)

    def _look_after(self) -> None:
        """Requests that wait for their turn stop the reading, and with it the news that the client is gone: the kernel knows."""
        self._look = None
        if not self.pipeline or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED:
                self.eof_received()
            self._look = self.loop.call_later(LOOK_S, self._look_after)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more will happen here. What the client has not read of the last answer it is not going to read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _expect_headers(self) -> None:
        """A connection that does not send the headers of a request in time is closed."""
        self._header_timer = self.loop.call_later(HEADERS_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """As uvicorn has it, but that an offer of another protocol loses neither the body nor what comes after it."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _decline(self, rest: bytes) -> None:
        """The request whose headers have just come, taken for one that offers nothing. `rest`: what came after them."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        head = without_offer(method, self.url, version, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(head + rest)

    @property
    def _offered(self) -> bool:
        return bool(self.parser.should_upgrade())

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._header_timer.cancel()
        if self._offered:
            return
        super().on_headers_complete()
        self._arriving = False
        if self.pipeline and self._look is None:
            self._look = self.loop.call_later(LOOK_S, self._look_after)
        self.scope[PIPE] = BodyPipe(self.cycle)  # type: ignore[typeddict-unknown-key]
        if self.scope["http_version"] in ("1.0", "0.9"):
            self.scope[_UNCHUNKED] = self.cycle  # type: ignore[typeddict-unknown-key]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_timer.cancel()
        self._expect_headers()
        self.scope[TRANSPORT] = self  # type: ignore[typeddict-unknown-key]
        self._header_bytes = 0
        self._arriving = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = RequestError(f"the headers are larger than the limit of {MAX_HEADER_BYTES} bytes", status=431)
            raise ValueError("headers too large")
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        error = self._refusal or RequestError("the bytes received are not an HTTP request that this server takes")
        body, status = error_body(error), b"%d %b" % (error.status, HTTPStatus(error.status).phrase.encode())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self._note(error), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % header for header in dict(headers).items())
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, head, body))
        self.transport.close()

    def _note(self, error: RequestError) -> list[tuple[bytes, bytes]]:
        """Let the gate count what it will never see, or see the end of only; the headers of every answer."""
        refused = getattr(self.app, "refused", None)
        if refused is None:
            return []
        if not self._arriving and self.cycle is not None:
            self.cycle.scope[FAULT] = error  # type: ignore[typeddict-unknown-key]
        path = _path_of(self.url) if self._arriving else ""
        method = self.parser.get_method().decode("ascii", "replace") if self._arriving and path else "-"
        found: list[tuple[bytes, bytes]] = refused({"path": path, "method": method, "client": self.client}, error)
        return found


def _path_of(url: bytes) -> str:
    """Of a request whose headers are not all there, or not in order."""
    try:
        path = httptools.parse_url(url).path or b""
    except httptools.HttpParserInvalidURLError:
        path = url.partition(b"?")[0]
    return path.decode("ascii", "replace")


def frame_by_close(scope: MutableMapping[str, Any], message: MutableMapping[str, Any]) -> None:
    """Before a message is sent to an HTTP/1.0 client: a body of unknown length ends with the connection, without chunks."""
    cycle = scope.get(_UNCHUNKED)
    if cycle is None:
        return
    if message["type"] == "http.response.start":
        if any(name == b"content-length" for name, _ in message["headers"]):
            del scope[_UNCHUNKED]
        else:
            cycle.chunked_encoding = False
    else:
        cycle.expected_content_length = len(message.get("body", b""))


class FrontendServer(uvicorn.Server):
    """Leaves signals to the frontend. Asked to exit by `should_exit = True`, in the event loop's thread, it does so at once.

    `board`: of several frontends at one queue; None: there is one."""

    def __init__(self, config: uvicorn.Config, board: Board | None = None) -> None:
        self._exit = False
        self._turn = asyncio.Event()
        self._board = board
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn would take all connections there are at once."""
        board = self._board
        await super().startup(sockets if board is None else [])
        if board is not None:
            self.servers += [Acceptor(sock, board, self._protocol) for sock in sockets or []]  # type: ignore[misc]

    def _protocol(self, lost: Callable[[], None]) -> HttpProtocol:
        protocol = HttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.on_lost = lost
        return protocol

    @property
    def should_exit(self) -> bool:
        return self._exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._exit = value
        self._turn.set()

    async def main_loop(self) -> None:
        """uvicorn would look ten times a second whether to exit. A tick renews the Date header."""
        while not await self.on_tick(0):
            self._turn.clear()
            timer = asyncio.get_running_loop().call_later(until_tick(1.0), self._turn.set)
            await self._turn.wait()
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def uvicorn_config(app: object, *, keep_alive: float, backlog: int) -> uvicorn.Config:
    """Settings of the data plane's server; logging, access log and signals are the frontend's own."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,
    )
