"""Small processes to be supervised: `python child.py WHAT [ARGUMENT]`. Needs nothing but the standard library."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time


def note(what: str) -> None:
    """Append one line to the file named by TRACE: what happened, in which process, when."""
    line = {"what": what, "name": os.environ["SUPERVISOR_PROCESS_NAME"], "pid": os.getpid(), "at": time.monotonic()}
    with open(os.environ["TRACE"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def work() -> None:
    """Run until TERM, then end with 0."""

    def stop(*_: object) -> None:
        note("term")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    note("start")
    while True:
        time.sleep(100)


def stubborn() -> None:
    """Ignores TERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("start")
    time.sleep(1000)


def fail(status: str) -> None:
    note("start")
    print("one last word", file=sys.stderr, flush=True)
    os._exit(int(status))


def later(status: str) -> None:
    """The first incarnation works, later ones fail."""
    if os.environ["LLMD_INCARNATION"] == "1":
        work()
    fail(status)


def env() -> None:
    path = os.environ["TRACE"] + ".env"
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv, "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))}, file)
    os.rename(path + ".new", path)  # whoever sees it sees all of it
    work()


def family() -> None:
    """Has a child of its own, in its process group."""
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    note(f"grandchild {grandchild.pid}")
    work()


def dumps() -> None:
    """Writes a word on the stacks signal, as faulthandler would, and is deaf otherwise."""
    signal.signal(signal.SIGUSR1, lambda *_: (os.write(2, b"stack of a hung child\n"), None)[1])
    note("start")
    while True:
        time.sleep(100)


def listener() -> None:
    """An event listener that notes every event, as control is one."""
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: (note("term"), os._exit(0)))
    note("start")
    while True:
        out.write(b"READY\n")
        head = dict(part.split(":", 1) for part in sys.stdin.readline().split())
        body = sys.stdin.read(int(head["len"]))
        note(f"event {head['eventname']} {body}")
        out.write(b"RESULT 2\nOK")


def serve() -> None:
    """Answers HTTP on fd 0 with its pid."""
    server = socket.socket(fileno=0)
    signal.signal(signal.SIGTERM, lambda *_: (note("term"), os._exit(0)))
    note("start")
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            body = str(os.getpid()).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def spam() -> None:
    """Writes log lines without end, and notes that it is getting on."""
    line = b"x" * 200 + b"\n"
    while True:
        for _ in range(2000):
            os.write(2, line)
        note("spam")
        time.sleep(0.05)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
