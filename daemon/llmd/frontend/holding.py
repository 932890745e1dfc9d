"""Requests that arrive while the engine is away, or at a new frontend before it has heard of control, wait here: for
`supervision.hold_timeout` at most, and no more of them than the queue takes.
"""

from __future__ import annotations

import asyncio
import time

from llmd.errors import RequestError
from llmd.frontend.body import ClientGone
from llmd.frontend.engine_view import EngineView
from llmd.frontend.exchange import Receive
from llmd.observability.totals import Meter


async def admit(view: EngineView, meter: Meter, receive: Receive, *, admitted: bool) -> None:
    """Return when the request may come in; its body has been read. `admitted`: it was let in before a drain began, which waits for it.

    Raises the RequestError that keeps it out, and ClientGone where its client hangs up meanwhile.
    """
    refusal = view.refusal(admitted=admitted)
    if refusal is None:
        return
    if not _passes(view, refusal):
        raise refusal
    if view.held >= view.most_held:
        raise RequestError(f"the engine is away, and {view.held} requests are waiting for it already", code="queue_full")
    view.held += 1
    meter.set("llmd_requests_held", view.held)
    try:
        await _hold(view, receive, refusal, admitted)
    finally:
        view.held -= 1
        meter.set("llmd_requests_held", view.held)


async def _hold(view: EngineView, receive: Receive, refusal: RequestError | None, admitted: bool) -> None:
    deadline = time.monotonic() + view.supervision.hold_timeout
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        while refusal is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not _passes(view, refusal):
                raise refusal
            turn = asyncio.ensure_future(view.turn())
            await asyncio.wait([gone, turn], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            if gone.done():
                raise ClientGone
            refusal = view.refusal(admitted=admitted)
    finally:
        gone.cancel()


def _passes(view: EngineView, refusal: RequestError) -> bool:
    """Whether it is worth waiting for the end of what `refusal` says."""
    return view.unsettled or (refusal.code == "engine_unavailable" and view.passing)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
