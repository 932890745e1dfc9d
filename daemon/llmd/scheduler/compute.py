"""`Compute`: where steps run: in the scheduler's own thread, or in one beside it, so that the next is prepared while one computes.

Steps run in the order of their launch. One that is launched before the last one's tokens are known has placeholders in their place,
which are filled in here, where the tokens come out.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from llmd.model.batch import ForwardBatch, Ints, Runner, SampleRequest, SampleResult
from llmd.scheduler.schedule_batch import ScheduleBatch

#: Both threads run Python for a few hundred microseconds a step; waiting for the interpreter's usual 5 ms would stop the computing one.
_SWITCH_INTERVAL = 0.0002
#: How long `close` waits for the step that runs: the process ends all the same.
_CLOSE_WAIT = 5.0


@dataclass(slots=True)
class Step:
    """One step on its way."""

    batch: ScheduleBatch
    arrays: ForwardBatch
    wanted: list[SampleRequest]
    done: threading.Event = field(default_factory=threading.Event)
    results: list[SampleResult] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0
    """How long it computed."""


class Compute:
    """One runner's steps."""

    def __init__(self, runner: Runner, *, overlap: bool) -> None:
        self._runner = runner
        self.overlap = overlap
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._tokens: Ints = np.empty(0, dtype=np.int64)
        self._thread: threading.Thread | None = None
        if overlap:
            sys.setswitchinterval(_SWITCH_INTERVAL)
            self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
            self._thread.start()

    def launch(self, step: Step) -> None:
        """Run `step` after those launched before; without overlap, now."""
        if self.overlap:
            self._steps.put(step)
        else:
            self._run(step)

    def wait(self, step: Step) -> list[SampleResult]:
        """The results, as soon as they are there; raises what the runner raised. Whoever watches the pulse ends a step that hangs."""
        step.done.wait()
        if step.error is not None:
            raise step.error
        return step.results

    def close(self) -> None:
        """Take no more steps."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join(_CLOSE_WAIT)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            self._run(step)

    def _run(self, step: Step) -> None:
        began = time.monotonic()
        try:
            ids = step.arrays.input_ids
            late = ids < 0
            if late.any():
                ids[late] = self._tokens[-1 - ids[late]]
            step.results = self._runner.step(step.arrays, step.wanted)
            self._tokens = np.array([result.token_id for result in step.results], dtype=np.int64)
        except Exception as error:
            step.error = error
            # The next step may be on its way with these tokens' requests in it; they have failed, and the others must not.
            self._tokens = np.zeros(len(step.wanted), dtype=np.int64)
        step.seconds = time.monotonic() - began
        step.done.set()
