"""Speaks HTTP with the admin plane, over its unix socket or TCP. Standard library only: this is what keeps llmctl's start short.

No proxy is ever used. The outcome of a change whose answer did not come is not known: that is exit status 69, whatever the reason.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from llmctl import exits, find
from llmctl.exits import CtlError

#: What to do where an answer does not come.
_HINTS = {
    "GET": "its control process may hang: llmd replaces it after supervision.control_timeout (5s by default), ask again then",
    "POST": "what was asked may still go on: llmctl status; a longer --timeout waits longer",
}
_NO_HEADERS: Mapping[str, str] = {}
#: Seconds for which a change waits for a control process that is being replaced. A question is not kept waiting: it is answered from what is left.
BACK_WITHIN = 15.0
#: Seconds between two tries.
TRY_EVERY = 0.05
#: Largest reply that is read.
MAX_REPLY = 16 * 2**20
#: Error codes whose exit status is not that of their HTTP status.
CODES = {"incompatible_weights": exits.BAD_INPUT, "timeout": exits.TIMED_OUT, "request_timeout": exits.TIMED_OUT}
STATUSES = {401: exits.PERMISSION, 403: exits.PERMISSION, 409: exits.BUSY, 429: exits.BUSY, 422: exits.BAD_INPUT, 504: exits.TIMED_OUT}


class ConnectionLost(CtlError):
    """The connection broke before the answer was there."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("llmd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Remote:
    """An admin plane over TCP."""

    host: str
    port: int
    tls: bool
    key: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, key_file: str | None) -> Remote:
        """Raises CtlError: a bad URL, a key file that cannot be read."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host or port is None or parts.path not in ("", "/"):
            raise CtlError(exits.USAGE, f"--url: expected https://HOST:PORT or http://HOST:PORT, got {url!r}")
        try:
            key = Path(key_file).read_text().strip() if key_file else ""
        except OSError as error:
            raise CtlError(exits.BAD_INPUT, f"--key-file: {key_file}: {error.strerror}") from None
        return cls(host, port, parts.scheme == "https", key)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """Raises CtlError: 3 where nobody listens, 4 where nobody answers, 77 where the certificate is not trusted."""
        connection = (
            http.client.HTTPSConnection(self.host, self.port, timeout=timeout)
            if self.tls
            else http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        )
        where = f"{self.host}:{self.port}"
        try:
            connection.connect()
        except TimeoutError:
            raise CtlError(exits.NOT_ANSWERING, f"{where} took no connection within {timeout:g} s") from None
        except OSError as error:
            if self.tls and "CERTIFICATE" in str(error):
                raise CtlError(exits.PERMISSION, f"{where}: its certificate is not trusted: {error}", "name your authority in SSL_CERT_FILE") from None
            raise CtlError(exits.NOT_RUNNING, f"nobody listens on {where}: {error.strerror or error}", "is admin.listen set, and llmd running?") from None
        return connection


@dataclass(frozen=True)
class Client:
    """The daemon at one of `candidates`, or at `remote`."""

    candidates: list[find.Place]
    instance: str | None = None
    remote: Remote | None = None

    @classmethod
    def locate(
        cls, socket_path: str | None, instance: str | None, environ: Mapping[str, str], *, url: str | None = None, key_file: str | None = None
    ) -> Client:
        """Raises CtlError where `url` or `key_file` cannot be."""
        if url is not None:
            return cls([], instance, Remote.at(url, key_file))
        return cls(find.places(socket_path, instance, environ), instance)

    @property
    def place(self) -> find.Place:
        """Where the daemon is on this machine. Raises CtlError (3) that says where it was looked for."""
        if self.remote is not None:
            raise CtlError(exits.USAGE, "this needs the daemon's own machine, and does not go with --url")
        chosen = find.choose(self.candidates)
        if chosen is None:
            looked = ", ".join(str(place.socket) for place in self.candidates)
            raise CtlError(exits.NOT_RUNNING, f"llmd is not running: there is no socket at {looked}", self._start_hint())
        return chosen

    def place_or_none(self) -> find.Place | None:
        """Where a daemon lives on this machine, if one does."""
        return next((place for place in self.candidates if place.pid is not None), None)

    def get(self, path: str, timeout: float, **query: Any) -> Any:
        """The JSON answer of a GET. Raises CtlError."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path, None, timeout)

    def text(self, path: str, timeout: float) -> str:
        """The text of a GET, whatever it is. Raises CtlError."""
        with self._sent("GET", path, None, timeout) as (response, connection):
            data = _read(response, connection, time.monotonic() + timeout)
            if response.status >= 400:
                _decode(response.status, data, path)
            return data.decode("utf-8", "replace")

    def post(self, path: str, body: dict[str, Any], timeout: float, key: str | None = None) -> Any:
        """The JSON answer of a POST. `key`: a call with the same one is not run again, but answered as the first. Raises CtlError."""
        return self._request("POST", path, json.dumps(body).encode(), timeout, {"Idempotency-Key": key} if key else {})

    def alive(self) -> bool:
        """Whether the daemon runs, be it that it does not answer now. Of one on another machine only an answer tells."""
        return self.remote is not None or self.place_or_none() is not None

    def stream(self, path: str, silence: float) -> Iterator[bytes]:
        """The lines of an answer that does not end. Raises CtlError (69) when it does, or when nothing has come for `silence` seconds."""
        with self._sent("GET", path, None, silence) as (response, connection):
            if response.status >= 400:
                _decode(response.status, response.read(MAX_REPLY), path)
            if connection.sock is not None:
                connection.sock.settimeout(silence)
            while line := response.readline(MAX_REPLY):
                yield line
        raise CtlError(exits.LOST, "the connection to llmd was lost", "llmctl status")

    def _request(self, method: str, target: str, body: bytes | None, timeout: float, headers: Mapping[str, str] = _NO_HEADERS) -> Any:
        deadline = time.monotonic() + timeout
        with self._sent(method, target, body, timeout, headers) as (response, connection):
            return _decode(response.status, _read(response, connection, deadline), target)

    @contextlib.contextmanager
    def _sent(
        self, method: str, target: str, body: bytes | None, timeout: float, more: Mapping[str, str] = _NO_HEADERS
    ) -> Iterator[tuple[http.client.HTTPResponse, http.client.HTTPConnection]]:
        """A request that is on its way, and its answer as it begins."""
        connection = self.remote.connect(timeout) if self.remote is not None else self._unix(timeout, BACK_WITHIN if method == "POST" else 0.0)
        headers = {**more, **({"Content-Type": "application/json"} if body is not None else {})}
        if self.remote is not None and self.remote.key:
            headers["Authorization"] = f"Bearer {self.remote.key}"
        try:
            connection.request(method, target, body, headers)
            yield connection.getresponse(), connection
        except TimeoutError:
            status = exits.LOST if method == "POST" else exits.NOT_ANSWERING
            raise CtlError(status, f"llmd did not answer {method} {target.partition('?')[0]} within {timeout:g} s", _HINTS[method]) from None
        except (OSError, http.client.HTTPException) as error:
            hint = "what was asked may still go on: llmctl status, llmctl audit" if method == "POST" else "llmctl status"
            raise ConnectionLost(exits.LOST, f"the connection to llmd was lost: {error or type(error).__name__}", hint) from None
        finally:
            connection.close()

    def _unix(self, timeout: float, patience: float) -> _UnixConnection:
        """A connection, `patience` seconds at most after the first try, and `timeout`, where the daemon runs without anybody who listens."""
        place = self.place
        connection = _UnixConnection(str(place.socket), timeout)
        try:
            self._connect(connection, place, timeout, time.monotonic() + min(timeout, patience))
        except CtlError:
            connection.close()
            raise
        return connection

    def _connect(self, connection: _UnixConnection, place: find.Place, timeout: float, deadline: float) -> None:
        try:
            while not self._listened(connection, place, deadline):
                time.sleep(TRY_EVERY)
        except TimeoutError:
            raise CtlError(exits.NOT_ANSWERING, f"llmd (pid {place.pid}) took no connection within {timeout:g} s", "llmctl status -o json") from None
        except PermissionError:
            hint = "join the group that owns it (admin.group, llmd-admin by default), or use sudo"
            raise CtlError(exits.PERMISSION, f"you may not use {place.socket}", hint) from None
        except OSError as error:
            raise self._unreachable(place, error) from None

    def _listened(self, connection: _UnixConnection, place: find.Place, deadline: float) -> bool:
        """Connect; False: nobody listens yet, try again. Raises OSError."""
        try:
            connection.connect()
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            if place.pid is None or time.monotonic() >= deadline:
                raise
            return False
        return True

    def _unreachable(self, place: find.Place, error: OSError) -> CtlError:
        pid = place.pid
        if pid is not None:
            message = f"llmd runs (pid {pid}), but nobody listens on {place.socket}: its control process is starting or being replaced"
            return CtlError(exits.NOT_ANSWERING, message, "try again in a few seconds")
        why = os.strerror(error.errno) if error.errno else str(error)
        last = place.last_state
        ended = f"; its last state was {last.get('state')}" if last.get("state") else ""
        reason = f" ({last['reason']})" if last.get("reason") else ""
        return CtlError(exits.NOT_RUNNING, f"llmd is not running: {place.socket}: {why}{ended}{reason}", self._start_hint(place))

    def _start_hint(self, place: find.Place | None = None) -> str:
        """What starts it; without systemd with the file that the last one at `place` was started with."""
        unit = f"llmd@{self.instance}" if self.instance else "llmd"
        config = place.lock.get("config") if place is not None else None
        file = config.get("file") if isinstance(config, dict) else None
        with_file = f" -c {shlex.quote(file)}" if isinstance(file, str) and file else ""
        command = f"systemctl start {unit}" if os.path.isdir("/run/systemd/system") else f"llmd run{with_file}"
        return f"start it with `{command}`, or say where it is with --socket PATH"


def _read(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    """The body, within the deadline as a whole and not only between two bytes."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_REPLY:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = response.read1(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise http.client.HTTPException("the reply is too large")


def _decode(status: int, data: bytes, target: str) -> Any:
    try:
        reply = json.loads(data) if data else {}
    except ValueError:
        raise CtlError(exits.LOST, f"llmd answered {status} with something that is not JSON", "is this llmd's admin socket?") from None
    if status < 400:
        return reply
    raise _refusal(status, reply if isinstance(reply, dict) else {}, target.partition("?")[0])


def _refusal(status: int, reply: dict[str, Any], path: str) -> CtlError:
    """The error that an error reply stands for."""
    error = reply.get("error")
    error = error if isinstance(error, dict) else {}
    code = error.get("code")
    exit_status = CODES.get(str(code)) or STATUSES.get(status, exits.FAILED)
    if status == 400 and error.get("param"):
        exit_status = exits.BAD_INPUT
    operation = reply.get("operation")
    if isinstance(operation, dict) and operation.get("state") == "rolled_back":
        exit_status = exits.FAILED
    elif isinstance(operation, dict) and operation.get("outcome") == "unknown":
        exit_status = exits.LOST
    if status in (404, 405) and error.get("message") in (None, "Not Found", "Method Not Allowed"):
        return CtlError(exits.FAILED, f"this llmd does not have {path}", "llmctl version shows both versions", reply)
    message = str(error.get("message") or f"llmd answered {status} to {path}")
    return CtlError(exit_status, message, str(error.get("hint") or ""), reply)
