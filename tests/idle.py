"""For what a process does while it has nothing to do: the kernel's books of it, and a scheduler in a thread of its own, with the real input."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.observability.totals import Meter
from llmd.plan.ports import PortArgs
from llmd.scheduler.input import Input
from llmd.wire import sockets
from llmd.wire.messages import Command, SamplingParams, TokenizedGenerateReqInput
from tests.daemon import SLOW
from tests.unit.scheduler.harness import Bench, CheckingRunner


def books(pid: int) -> tuple[float, int]:
    """(CPU seconds, times that it was woken: all of its threads' waits) since the process's start."""
    cpu_ns = waits = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
            lines = (thread / "status").read_text().splitlines()
            waits += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return cpu_ns / 1e9, waits


class IdleScheduler:
    """Use as a context manager. `wake` sends one request of one token."""

    def __init__(self, directory: Path) -> None:
        began: queue.SimpleQueue[float] = queue.SimpleQueue()

        class Stamping(CheckingRunner):
            def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
                began.put(time.monotonic())
                return super().step(batch, wanted)

        self._began = began
        self._context = zmq.Context()
        ports = PortArgs(str(directory))
        ports.private.mkdir()
        self._input = Input(1, Meter())
        self._input.open(self._context, ports)
        self._socket = sockets.push(self._context, ports.scheduler_input(1))
        self.bench = Bench(runner=Stamping)
        self.bench.scheduler._input = self._input
        self._count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.turns = 0

    def __enter__(self) -> IdleScheduler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._input.hand_over(Command(id=0, verb="end"))
        self._thread.join(10)
        self._input.close()
        self._socket.close()
        self._context.term()

    def wake(self) -> float:
        """Seconds from the send to the begin of the request's step."""
        self._count += 1
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        request = TokenizedGenerateReqInput(rid=f"r{self._count}", frontend=0, epoch=1, input_ids=[1, 2, 3, self._count % 90], sampling=params)
        sent = time.monotonic()
        while not sockets.send(self._socket, request):  # the first one may find no connection yet
            time.sleep(0.001)
            sent = time.monotonic()
        return self._began.get(timeout=30 * SLOW) - sent

    def _run(self) -> None:
        scheduler = self.bench.scheduler
        receive = scheduler.receive

        def counted(on_command: Any) -> None:
            self.turns += 1
            receive(on_command)

        scheduler.receive = counted  # type: ignore[method-assign]
        try:
            scheduler.run(self._end)
        except SystemExit:
            return

    @staticmethod
    def _end(command: Command) -> None:
        raise SystemExit
