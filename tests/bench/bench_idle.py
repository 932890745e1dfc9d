"""What an idle daemon costs, and how fast its scheduler wakes: `python -m tests.bench.bench_idle [MODEL [SECONDS]]`.

CPU time and context switches of every process of an idle `llmd run`, by its own books; then the time from the send of a request to the
begin of its first step, in a scheduler that had nothing to do, over its real socket. MODEL is `dummy` or one that is in the cache.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.daemon import Daemon
from tests.idle import IdleScheduler, books


def idle(model: str, seconds: float) -> float:
    """Print a line a process; returns the whole daemon's CPU seconds a second."""
    config: dict[str, Any] = {"model": {"path": model}} if model else {}
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), config=config, failpoints="" if model == "dummy" else None) as daemon:
        daemon.start(timeout=120)
        daemon.complete()
        time.sleep(3)  # what follows a request: the books are checked, a log is written
        assert daemon.process is not None
        processes = [psutil.Process(daemon.process.pid), *daemon.children()]
        names = ["supervisor", *(" ".join(p.cmdline()).strip() for p in processes[1:])]
        before, began = [books(p.pid) for p in processes], time.monotonic()
        time.sleep(seconds)
        after, took = [books(p.pid) for p in processes], time.monotonic() - began
        total = 0.0
        for name, (cpu0, waits0), (cpu1, waits1) in zip(names, before, after, strict=True):
            total += (cpu1 - cpu0) / took
            print(f"  {name[:40]:40} {(cpu1 - cpu0) / took:7.3%} of a core, {(waits1 - waits0) / took:6.1f} wake-ups a second")
        print(f"idle daemon ({model or 'embedded model'}): {total:.2%} of a core over {took:.0f} s", flush=True)
        daemon.stop()
    return total


def wake(count: int = 100) -> None:
    """Print how long a request takes from its send to its first step, each finding the scheduler idle."""
    with tempfile.TemporaryDirectory() as directory, IdleScheduler(Path(directory)) as scheduler:
        scheduler.wake()
        taken = []
        for _ in range(count):
            time.sleep(0.02)
            taken.append(scheduler.wake() * 1e3)
    taken.sort()
    print(f"an idle scheduler starts a request after {statistics.median(taken):.2f} ms (p90 {taken[count * 9 // 10]:.2f}, worst {taken[-1]:.2f})", flush=True)


def main() -> None:
    model, seconds = (sys.argv[1:] + ["dummy", "20"][len(sys.argv) - 1 :])[:2]
    wake()
    idle("" if model == "embedded" else model, float(seconds))


if __name__ == "__main__":
    main()
