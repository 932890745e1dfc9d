"""Generating, in the Engine's loop: `Job` is one call of `generate`, read whole or piece by piece."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from typing import Any, Final

from llmd.engine.frontend import EmbeddedFrontend
from llmd.errors import RequestError
from llmd.frontend.exchange import outcome_of
from llmd.frontend.native.choices import results_of, specs_of, tokenized
from llmd.frontend.native.params import Asked, Batch, read_batch
from llmd.frontend.native.results import Result
from llmd.frontend.req_state import Generation

#: The endpoint's name in the metrics.
ENDPOINT: Final = "engine.generate"
#: How often a wait for tokens looks up; it has no other deadline than the engine's own.
_LOOK_S: Final = 3600.0

Answer = dict[str, Any] | list[dict[str, Any]]


class Job:
    """One call. `begin`, then `whole` or `pieces` until it is over, and `close` in any case."""

    def __init__(self, frontend: EmbeddedFrontend, asked: Asked, *, streamed: bool, with_text: bool) -> None:
        self._frontend = frontend
        self._side = frontend.side
        self._asked = asked
        self._streamed = streamed
        self._with_text = with_text
        self._open: AbstractContextManager[None] | None = None
        self._batch = Batch([], single=True)
        self._generation: Generation | None = None
        self._results: list[Result] = []

    async def begin(self) -> None:
        """Wait until requests may come in, check, tokenize, submit. Raises RequestError."""
        side = self._side
        await self._frontend.admitted(side.boot.args.supervision.hold_timeout)
        self._open = side.manager.request()
        self._open.__enter__()
        self._batch = read_batch(self._asked, vocabulary=side.boot.files.tokenizer_size, manager=side.manager)
        specs = specs_of(side, self._batch, await tokenized(side, self._batch))
        self._frontend.check()  # the child may have died while texts became ids
        generation = self._generation = side.manager.submit(f"gen-{uuid.uuid4().hex}", specs, streamed=self._streamed)
        self._results = results_of(self._batch, generation, weights_version=side.view.weights_version, with_text=self._with_text)

    async def whole(self) -> Answer:
        """The result of every choice, once all are finished."""
        await self._wait()
        assert self._generation is not None
        for delta in self._generation.take():
            self._results[delta.index].add(delta)
        bodies = [result.body() for result in self._results]
        return bodies[0] if self._alone else bodies

    async def pieces(self) -> list[dict[str, Any]]:
        """What is new, cumulative for each choice that has grown; empty when all is over."""
        assert self._generation is not None
        if self._generation.done and self._generation.error is None:
            return []
        await self._wait()
        bodies = []
        for delta in self._generation.take():
            self._results[delta.index].add(delta)
            body = self._results[delta.index].body()
            bodies.append(body if self._alone else body | {"index": delta.index})
        return bodies

    def ended_with(self) -> RequestError | None:
        """The error that has ended it; for one who asks when there is no loop any more. None: it has not been ended."""
        return self._generation.error.copy() if self._generation is not None and self._generation.error is not None else None

    def close(self, error: BaseException | None = None) -> None:
        """Forget it; what still runs is aborted. Idempotent."""
        if self._open is None:
            return
        generation, meter = self._generation, self._side.meter
        if generation is not None:
            self._side.manager.release(generation, "aborted")
            meter.inc("llmd_prompt_tokens_total", sum(len(state.request.input_ids) for state in generation.choices))
            meter.inc("llmd_generation_tokens_total", sum(len(state.output_ids) for state in generation.choices) - generation.counted)
        meter.inc("llmd_requests_total", endpoint=ENDPOINT, outcome=self._outcome(error))
        self._open.__exit__(None, None, None)
        self._open = None

    @property
    def _alone(self) -> bool:
        return self._batch.single and len(self._results) == 1

    async def _wait(self) -> None:
        assert self._generation is not None
        while not await self._generation.wait(_LOOK_S):
            pass
        if self._generation.error is not None:
            raise self._generation.error.copy()

    def _outcome(self, error: BaseException | None) -> str:
        if isinstance(error, RequestError):
            return outcome_of(error)
        if error is not None or self._generation is None:
            return "abort"
        reasons = {state.finish.reason if state.finish else "abort" for state in self._generation.choices}
        return next(reason for reason in ("abort", "length", "stop") if reason in reasons)


async def generate(frontend: EmbeddedFrontend, asked: Asked, *, with_text: bool) -> Answer:
    """One call, whole."""
    job = Job(frontend, asked, streamed=False, with_text=with_text)
    error: BaseException | None = None
    try:
        await job.begin()
        return await job.whole()
    except BaseException as caught:
        error = caught
        raise
    finally:
        job.close(error)
