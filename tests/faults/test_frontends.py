"""Several frontends: one that dies or hangs takes only its own connections along; names, keys, aborts and drains are everybody's."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import HANGS, SLOW, Brake, Daemon, gone, wait_for

WORKERS = 3
CONFIG: dict[str, Any] = {
    "supervision": {"helper_timeout": HANGS, "control_timeout": HANGS, "restart": {"max": 1000, "backoff": ["0s", "0s", "0s"]}},
    "model": {"path": "dummy"},
    "memory": {"max_running_requests": 64},
}
KEY = "k" * 32


class Connection(http.client.HTTPConnection):
    """One connection, and the frontend that has taken it."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__("127.0.0.1", daemon.port, timeout=60 * SLOW)
        self._daemon = daemon
        self.frontend, self.retry_after = -1, 0

    def known(self, pids: dict[int, int]) -> Connection:
        """Connect, and see who has taken it. `pids`: pid -> frontend."""
        self.request("GET", "/livez")
        self.getresponse().read()
        mine = self.sock.getsockname()[1]
        for pid, rank in pids.items():
            if any(c.raddr and c.raddr.port == mine for c in psutil.Process(pid).net_connections("tcp")):
                self.frontend = rank
        assert self.frontend >= 0
        return self

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.request("POST", path, json.dumps(body), headers)
        answer = self.getresponse()
        self.retry_after = int(answer.headers["Retry-After"] or 0)
        return answer.status, json.loads(answer.read())


class Reader(threading.Thread):
    """A stream of `tokens` tokens; `text` is what came, `whole` whether its end did."""

    def __init__(self, connection: Connection, tokens: int) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self.text, self.whole = "", False
        body = {"prompt": "hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.answer = connection.getresponse()
        assert self.answer.status == 200

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in self.answer:
                if line == b"data: [DONE]\n":
                    self.whole = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    self.text += event["choices"][0]["text"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frontends")


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[Daemon]:
    config = CONFIG | {"http": {"port": 0, "workers": WORKERS}}
    with Daemon(directory, config=config, failpoints=Brake(directory, on=False).steps).start() as daemon:
        yield daemon
        daemon.stop_cleanly()


@pytest.fixture
def brake(directory: Path) -> Iterator[Brake]:
    """The daemon's, which is on until the test releases it."""
    made = Brake(directory)
    yield made
    made.release()


def frontends(daemon: Daemon) -> dict[int, int]:
    """pid -> rank."""
    return {daemon.pid("frontend", rank): rank for rank in range(WORKERS)}


@contextlib.contextmanager
def on_each(daemon: Daemon, each: int = 1) -> Iterator[list[Connection]]:
    """`each` connections to every frontend, by frontend."""
    pids = frontends(daemon)
    with contextlib.ExitStack() as stack:
        found: list[Connection] = []

        def enough() -> bool:
            connection = Connection(daemon)
            stack.callback(connection.close)
            found.append(connection.known(pids))
            return all(sum(c.frontend == rank for c in found) >= each for rank in range(WORKERS))

        wait_for("connections to all frontends", enough, 20, 0.0)
        yield [c for rank in range(WORKERS) for c in [c for c in found if c.frontend == rank][:each]]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_that_dies_or_hangs_takes_only_its_own_connections_along(daemon: Daemon, brake: Brake, signum: signal.Signals) -> None:
    before, pids = len(daemon.children()), frontends(daemon)
    supervisor = psutil.Process(daemon.process.pid if daemon.process else 0)
    descriptors = supervisor.num_fds()
    victim = next(pid for pid, rank in pids.items() if rank == 1)
    with on_each(daemon, 3) as connections:
        readers = [Reader(connection, 500) for connection in connections]
        for reader in readers:
            reader.start()
        wait_for("all streams run", lambda: all(reader.text for reader in readers), 20)
        os.kill(victim, signum)
        for _ in range(10):
            assert daemon.text(max_tokens=1) == "h", "new connections are served"
        wait_for("its connections are broken", lambda: not any(r.is_alive() for r in readers if r.connection.frontend == 1), 60)
        brake.release()
        for reader in readers:
            reader.join(60 * SLOW)
            assert not reader.is_alive(), "no connection hangs"
            broken = reader.connection.frontend == 1
            assert reader.whole != broken
            assert broken or reader.text == "hello" * 100
    wait_for("a new frontend", lambda: (c := daemon.child("frontend", 1)) and c.pid != victim and gone([victim]), 20)
    wait_for("it serves", lambda: not daemon.status()["degraded"], 20)
    assert {pid for pid, rank in frontends(daemon).items() if rank != 1} == {pid for pid, rank in pids.items() if rank != 1}
    wait_for("nothing is owed", lambda: daemon.requests() == (0, 0) and daemon.status()["kv"]["pages_active"] == 0, 20)
    wait_for("the processes of the plan, and no other", lambda: len(daemon.children()) == before, 20)
    assert supervisor.num_fds() <= descriptors + 2


def test_a_name_runs_once_whichever_frontend_it_comes_to(daemon: Daemon, brake: Brake) -> None:
    with on_each(daemon) as (first, second, _):
        body = {"text": "hello", "rid": "mine", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
        answers: list[tuple[int, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(first.post("/generate", body)))
        thread.start()
        wait_for("it runs", lambda: daemon.requests()[0] == 1, 20)
        status, refused = second.post("/generate", body)
        assert (status, refused["error"]["code"]) == (409, "duplicate_request_id")
        aborted = daemon.admin("POST", "/v1/abort", {"rid": "mine"})
        assert aborted.status_code == 200, "whichever frontend has it"
        thread.join(30 * SLOW)
        brake.release()
        assert answers[0][0] == 409 and answers[0][1]["error"]["code"] == "aborted"
        short = body | {"sampling_params": {"max_new_tokens": 2}}
        assert [connection.post("/generate", short)[0] for connection in (second, first, second)] == [200] * 3, "then it is free"


@pytest.mark.usefixtures("brake")
def test_requests_of_all_frontends_are_listed_aborted_by_client_and_counted_once(daemon: Daemon) -> None:
    with on_each(daemon) as connections:
        for connection in connections:
            body = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "X-Request-Id": "batch"})
        answers = [connection.getresponse() for connection in connections]
        listed = lambda: daemon.admin("GET", "/v1/requests").json()["requests"]  # noqa: E731
        wait_for("all are listed", lambda: sorted(row["frontend"] for row in listed() if row["client_id"] == "batch") == [0, 1, 2], 20)
        assert len(daemon.admin("POST", "/v1/abort", {"client_id": "batch"}).json()["data"]["aborted"]) == WORKERS
        assert all(b'"aborted"' in answer.read() for answer in answers)
        wait_for("any frontend tells of all", lambda: [aborted(c) for c in connections] == [WORKERS] * WORKERS, 20)


def aborted(connection: Connection) -> int:
    """Completions that were aborted, as the metrics of this frontend say."""
    connection.request("GET", "/metrics")
    found = re.search(r'^llmd_requests_total{endpoint="/v1/completions",outcome="abort"} (\d+)', connection.getresponse().read().decode(), re.MULTILINE)
    return int(found[1]) if found else 0


def test_a_drain_is_everybodys_also_of_a_frontend_that_comes_up_in_it(daemon: Daemon) -> None:
    with on_each(daemon) as connections:
        assert daemon.admin("POST", "/v1/drain", {}).status_code == 200
        assert [asked(connection) for connection in connections] == [(503, "draining")] * WORKERS
    old = daemon.pid("frontend", 2)
    os.kill(old, signal.SIGKILL)
    wait_for("another one", lambda: gone([old]) and daemon.child("frontend", 2) and not daemon.status()["degraded"], 20)
    assert {daemon.complete().status_code for _ in range(40)} == {503}, "the new one as well, which takes its share of connections"
    assert daemon.admin("POST", "/v1/resume", {}).status_code == 200
    with on_each(daemon) as connections:
        assert [asked(connection) for connection in connections] == [(200, None)] * WORKERS


def asked(connection: Connection, **fields: Any) -> tuple[int, str | None]:
    """Status and code of a short request."""
    status, answer = connection.post("/v1/completions", {"prompt": "hello", "max_tokens": 2} | fields)
    return status, answer.get("error", {}).get("code")


def test_keys_have_one_limit_whichever_frontend_they_come_to(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"limited:{KEY} tpm=100\n")
    keys.chmod(0o600)
    body = {"prompt": "hello", "max_tokens": 800, "ignore_eos": True}
    http_config = {"port": 0, "workers": WORKERS, "api_keys_file": str(keys)}
    with Daemon(tmp_path, config=CONFIG | {"http": http_config}, failpoints="").start() as daemon, on_each(daemon) as connections:
        first, *others = connections
        assert first.post("/v1/completions", body, KEY)[0] == 200
        for other in others:
            wait_for("it hears of it", lambda c=other: c.post("/v1/completions", body | {"max_tokens": 1}, KEY)[0] == 429, 10, 0.2)
            assert other.retry_after > 60, "it owes what the first one has used"
        old = daemon.pid("frontend", 1)
        os.kill(old, signal.SIGKILL)
        wait_for("another one", lambda: gone([old]) and daemon.child("frontend", 1) and not daemon.status()["degraded"], 20)
        with on_each(daemon) as again:
            wait_for("it hears of it too", lambda: again[1].post("/v1/completions", body | {"max_tokens": 1}, KEY)[0] == 429, 10, 0.2)
            assert again[1].retry_after > 60
        assert daemon.stop() == 0
