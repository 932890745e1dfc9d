"""What a start costs: `python -m tests.bench.bench_start [STARTS] [KEY=VALUE ...]`.

Prints the seconds until /readyz is 200, and the CPU seconds of each process by then. Minima of several starts: what else runs on the machine only
ever adds. The first start of a model packs its weights and is left out.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.daemon import Daemon


def main(argv: list[str]) -> int:
    """Start and stop llmd so often."""
    starts = int(argv[0]) if argv and argv[0].isdigit() else 5
    config: dict[str, Any] = {}
    for word in argv:
        if "=" in word:
            key, _, value = word.partition("=")
            section, _, name = key.partition(".")
            config.setdefault(section, {})[name] = value
    runs = [_start(config) for _ in range(starts + 1)][1:]
    for name in runs[0]:
        print(f"{name:22} {min(run[name] for run in runs):.3f} s")
    return 0


def _start(config: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), config=config) as daemon:
        began = time.monotonic()
        daemon.start(ready=False)
        while not _ready(daemon.port):
            time.sleep(0.01)
        found = {"ready after": time.monotonic() - began}
        assert daemon.process is not None
        own = psutil.Process(daemon.process.pid).cpu_times()
        found |= {"CPU of the supervisor": own.user + own.system, "of the checking child": own.children_user + own.children_system}
        for role in ("control", "frontend", "detokenizer", "scheduler"):
            child = daemon.child(role)
            assert child is not None
            times = child.cpu_times()
            found[f"of the {role}"] = times.user + times.system
        daemon.stop()
        return found


def _ready(port: int) -> bool:
    """By the standard library's client: httpx takes some 20 ms of CPU for each connection, on the cores that the start needs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
