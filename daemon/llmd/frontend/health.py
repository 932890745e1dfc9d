"""Health paths and the scrape target. All but /health_generate answer from memory, whatever the load."""

from __future__ import annotations

import asyncio
import logging
import uuid

from llmd.errors import RequestError
from llmd.frontend.exchange import Receive, Scope, Send
from llmd.frontend.replies import reply, reply_json
from llmd.frontend.runtime import EngineSide, Runtime
from llmd.frontend.tokenizer_manager import ChoiceSpec
from llmd.wire.messages import SamplingParams

log = logging.getLogger(__name__)

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def livez(scope: Scope, receive: Receive, send: Send) -> None:
    """This process answers: 200."""
    await reply_json(send, 200, {"status": "alive"})


class Health:
    """/readyz, /health (`what` = ready) and /startupz (`what` = started)."""

    def __init__(self, runtime: Runtime, what: str) -> None:
        self._view = runtime.view
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ok = self._view.ready if self._what == "ready" else self._view.started
        await reply_json(send, 200 if ok else 503, self._view.health(ok))


class Metrics:
    """The last exposition that control has published, with its age."""

    def __init__(self, runtime: Runtime) -> None:
        self._view = runtime.view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text, age = self._view.metrics() or ("", -1.0)
        if age < 0:
            raise RequestError("no metrics yet: control has not reported to this frontend", code="loading")
        tail = f"# HELP llmd_metrics_age_seconds Age of this exposition.\n# TYPE llmd_metrics_age_seconds gauge\nllmd_metrics_age_seconds {age:.3f}\n"
        body = text if text.endswith("\n") or not text else text + "\n"
        await reply(send, 200, (body + tail).encode(), [_TEXT])


class HealthGenerate:
    """One real token; at most one probe is in flight, and whoever comes meanwhile shares it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._probe: asyncio.Task[bool] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._runtime.view.refusal()
        if refusal is not None:
            raise refusal
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(probe(self._runtime, "health", 1, self._runtime.boot.args.supervision.helper_timeout))
        ok = await asyncio.shield(self._probe)
        self._runtime.meter.inc("llmd_health_generate_total", result="ok" if ok else "failed")
        if not ok:
            raise RequestError("no token came in time", code="engine_unavailable")
        await reply_json(send, 200, {"status": "ready"})


async def probe(runtime: EngineSide, text: str, tokens: int, deadline: float, *, tolerate: str = "") -> bool:
    """Generate `tokens` tokens greedily through all processes, outside the metrics of requests. False: no answer in time, or an error.

    `tolerate`: an error with this code counts as an answer.
    """
    manager = runtime.manager
    ids = await manager.encode(text, add_special_tokens=True)
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        generation = manager.submit(f"probe-{uuid.uuid4().hex}", [ChoiceSpec(ids, sampling)], streamed=False, metered=False)
    except RequestError:
        return False
    try:
        if not await generation.wait(deadline):
            return False
        error = generation.error
        if error is not None and error.code == tolerate:
            log.warning("a probe was answered with an error: %s", error.message)
        return error is None or error.code == tolerate
    finally:
        manager.release(generation, "timeout")
