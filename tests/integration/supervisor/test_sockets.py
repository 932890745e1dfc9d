"""The listening socket stays open whatever happens to those who accept on it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.daemon import SLOW
from tests.integration.supervisor.harness import Embedded, full, gone, until

Make = Callable[..., Embedded]


def address(one: Embedded) -> tuple[str, int]:
    url = json.loads((one.run_dir / "llmd.lock").read_text())["http"]
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host.strip("[]"), int(port)


def ask(where: tuple[str, int]) -> str:
    connection = http.client.HTTPConnection(*where, timeout=10 * SLOW)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_the_only_frontend_dies_and_no_client_is_refused(embedded: Make) -> None:
    one = embedded(full(), restart={"max": 100, "window": 60.0, "backoff": [0.0, 0.0, 0.0]}).start()
    one.ready()
    pids = set()
    for killed in range(4):
        one.wait_started("frontend-0", killed + 1)
        pids.add(ask(address(one)))
        frontend = one.pid("frontend-0")
        os.kill(frontend, signal.SIGKILL)
        until("it cannot accept any more", lambda: gone(frontend))  # noqa: B023
        # The next one may not be up yet: the connection waits in the backlog.
        pids.add(ask(address(one)))
    assert len(pids) == 5


def test_a_connection_in_the_backlog_of_a_hung_frontend_is_answered_by_the_next(embedded: Make) -> None:
    one = embedded(full()).start()
    one.ready()
    one.wait_started("frontend-0")
    old = one.pid("frontend-0")
    os.kill(old, signal.SIGSTOP)
    until("it has stopped, so cannot be in accept", lambda: psutil.Process(old).status() == psutil.STATUS_STOPPED)
    with socket.create_connection(address(one), timeout=10 * SLOW) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        one.call("kill", name="frontend-0", pid=old, reason="hang")
        assert b"200 OK" in client.recv(4096)


def test_ipv6(embedded: Make) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    one = embedded(full(), host="::1").start()
    assert ask(address(one)) == str(one.pid("frontend-0"))


def test_socket_activation(embedded: Make, tmp_path: Path) -> None:
    """The socket that systemd holds is used, and no child learns of the protocol."""
    held = socket.create_server(("127.0.0.1", 0))
    one = embedded(full(scheduler="env"))
    # LISTEN_PID must be the pid that execs, as systemd does it.
    script = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()));os.execv(sys.executable, sys.argv[2:])"
    )
    trace = {**os.environ, "TRACE": str(one.trace_path)}
    embed = Path(__file__).with_name("embed.py")
    argv = [sys.executable, "-c", script, str(held.fileno()), sys.executable, str(embed), str(one.directory / "given.json")]
    with one.log_path.open("ab") as log:
        one.process = subprocess.Popen(argv, env=trace, stdout=log, stderr=log, pass_fds=[held.fileno()])
    until("all are up", lambda: all(one.pid(name) for name in one.names))
    assert address(one)[1] == held.getsockname()[1]
    assert ask(address(one)) == str(one.pid("frontend-0"))
    seen = until("the environment", lambda: Path(f"{one.trace_path}.env").exists() and Path(f"{one.trace_path}.env").read_text())
    assert "LISTEN_" not in seen
    one.signal(signal.SIGKILL)
    one.wait()
    with socket.create_connection(held.getsockname()):
        pass  # nobody is there, and still nobody is refused
    held.close()


def test_children_inherit_nothing_but_their_three_descriptors(embedded: Make) -> None:
    one = embedded(full(scheduler="env")).start(env={"NOTIFY_SOCKET": "/nonexistent/notify", "WATCHDOG_USEC": "1000000", "SECRET": "kept"})
    path = Path(f"{one.trace_path}.env")
    seen = json.loads(until("the environment", lambda: path.exists() and path.read_text()))
    # 3 is the trace file, 4 the directory being listed.
    assert seen["fds"][:3] == [0, 1, 2]
    assert len(seen["fds"]) <= 5
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(seen["env"])
    assert (seen["env"]["LLMD_INCARNATION"], seen["env"]["LLMD_EPOCH"]) == ("1", "1")
    assert one.process is not None
    assert seen["env"]["LLMD_SUPERVISOR_PID"] == str(one.process.pid)


def test_a_burst_of_lines_that_are_no_reports_is_one_warning(embedded: Make) -> None:
    one = embedded(full()).start()
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10 * SLOW)
        line.connect(str(one.run_dir / "private" / "reports.sock"))
        line.sendall(b"no report\n" * 50)
        with line.makefile("rb") as answers:
            assert [answers.readline() for _ in range(50)] == [b"\n"] * 50
    one.ready()
    assert one.log().count("a report of control is none") == 1
