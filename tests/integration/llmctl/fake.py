"""A small admin plane on a unix socket, with the answers a test wants."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

STATUS: dict[str, Any] = {
    "state": "ready",
    "stage": "",
    "progress": 1.0,
    "reason": "",
    "degraded": [],
    "epoch": 1,
    "weights_version": "model.gguf@0123456789ab",
    "model": "smollm2-135m-instruct",
    "uptime_s": 7500.0,
    "processes": [
        {
            "role": "supervisor",
            "rank": 0,
            "pid": 11,
            "state": "ready",
            "restarts": 0,
            "uptime_s": 7500.0,
            "heartbeat_age_s": 0.2,
            "rss_bytes": 27 << 20,
            "last_exit": None,
        },
        {
            "role": "scheduler",
            "rank": 0,
            "pid": 12,
            "state": "busy",
            "restarts": 1,
            "uptime_s": 240.0,
            "heartbeat_age_s": 0.1,
            "rss_bytes": 700 << 20,
            "last_exit": {"status": -9, "reason": "hang", "age_s": 250.0, "stderr": ""},
        },
    ],
    "requests": {"running": 2, "waiting": 0},
    "kv": {"page_size": 16, "pages_total": 100, "pages_free": 75, "pages_active": 20, "pages_cached": 5},
    "throughput": {"prompt_tokens_s": 10.0, "generation_tokens_s": 12.5},
    "version": "0.1.0",
    "http": "http://127.0.0.1:8000",
}


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Fake:
    """Answers; `seen` holds the requests as (method, path, body)."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.answers: dict[str, tuple[int, Any]] = {
            "/v1/status": (200, STATUS),
            "/v1/processes": (200, {"processes": STATUS["processes"]}),
            "/v1/kv": (200, STATUS["kv"]),
        }
        self.seen: list[tuple[str, str, Any]] = []
        self.drop: bool | int = False
        """Close the connection instead of answering: always, or so many times."""
        self.keys: list[str | None] = []
        """The Idempotency-Key of each POST."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        path = handler.path.partition("?")[0]
        self.seen.append((handler.command, path, body))
        if handler.command == "POST":
            self.keys.append(handler.headers.get("Idempotency-Key"))
        if self.drop:
            self.drop = self.drop if self.drop is True else self.drop - 1
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        status, reply = self.answers.get(path, (404, {"error": {"message": "Not Found", "code": "not_found"}}))
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def serving(run_dir: Path) -> Iterator[Fake]:
    """A fake daemon that listens on RUN/admin.sock."""
    fake = Fake(run_dir)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def address_string(self) -> str:
            return "unix"

    server = _Server(str(run_dir / "admin.sock"), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def process_named_llmd() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that looks like llmd to `ps`."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "llmd"], stdin=subprocess.PIPE)
    try:
        # An exec is over a moment after Popen knows of it: until then there is no command line.
        deadline = time.monotonic() + 10
        while b"llmd" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.005)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        assert process.stdin is not None
        process.stdin.close()
