"""What control may ask of a frontend: `drain`, `resume`, `abort`, `warmup`, `shutting_down`, `freeze`. Each command gets one reply."""

from __future__ import annotations

import logging
from typing import Any, Final

from llmd import failpoints
from llmd.frontend.engine_view import shutting_down
from llmd.frontend.health import probe
from llmd.frontend.runtime import EngineSide
from llmd.observability.process import freeze_gc
from llmd.wire.link import WorkerLink
from llmd.wire.messages import Command

log = logging.getLogger(__name__)

#: Seconds that clients get to take the error event of a shutdown.
FAREWELL_S: Final = 1.0


async def obey(runtime: EngineSide, link: WorkerLink, command: Command) -> None:
    """Carry one command out and reply."""
    try:
        match command.verb:
            case "drain":
                runtime.view.drain()
                link.reply(command, {"inflight": runtime.manager.inflight})
            case "resume":
                runtime.view.resume()
                link.reply(command)
            case "abort":
                link.reply(command, {"aborted": runtime.manager.abort(**command.params)})
            case "freeze":
                freeze_gc()
                link.reply(command)
            case "shutting_down":
                link.reply(command, {"inflight": await farewell(runtime)})
            case "warmup":
                await _warmup(runtime, link, command)
            case _:
                link.reply(command, code="unknown_verb", message=f"a frontend knows no {command.verb!r}")
    except Exception:
        log.exception("command %s failed", command.verb)
        link.reply(command, code="internal_error", message=f"{command.verb} failed; the frontend's log has the details")


async def farewell(runtime: EngineSide) -> int:
    """End every open request with `shutting_down`; returns how many clients did not take it in time."""
    runtime.view.shut_down()
    runtime.manager.flights.fail_all(shutting_down())
    await runtime.manager.idle(FAREWELL_S)
    return runtime.manager.inflight


async def _warmup(runtime: EngineSide, link: WorkerLink, command: Command) -> None:
    failpoints.hit("frontend.warmup")
    deadline: Any = command.params.get("timeout_s", runtime.boot.args.supervision.startup_timeout)
    # Weights that were not verified may be damaged: that costs each request its answer, not the server its life.
    if await probe(runtime, "Hello", 2, float(deadline), tolerate="non_finite_logits"):
        link.reply(command)
    else:
        link.reply(command, code="engine_unavailable", message="the warm-up generation did not finish")
