"""`EngineView`: the daemon as this frontend knows it, from the last Publish and the commands that came since.

Answers in O(1) whether a request may come in, and if not, with which error; and what the health paths say.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from llmd.config.server_args import SupervisionArgs
from llmd.errors import RequestError
from llmd.plan.spec import Boot
from llmd.wire.messages import Publish

_LOADING: Final = ("starting", "loading", "warming")
_DRAINING: Final = ("draining", "stopping")
#: States in which an engine that is away is being brought back.
_ENGINE_RETURNS: Final = ("ready", "recovering", "reloading", "draining")


class EngineView:
    """State of the engine and the daemon. Used in the event loop only."""

    def __init__(self, boot: Boot, *, restarted: bool, rank: int = 0) -> None:
        """`restarted`: this frontend, of that rank, replaces one that had run."""
        self._boot = boot
        self._published: Publish | None = None
        self._at = 0.0
        self._settled = asyncio.Event()
        self._drain_command = False
        self._restarted, self._rank = restarted, rank
        self._arriving: set[asyncio.Timeout] = set()
        self._turn = asyncio.Event()
        self.held = 0
        """Requests that wait for the engine to come back (llmd.frontend.holding)."""
        self.prepared = False
        self.shutting_down = False

    # ------------------------------------------------------------ what comes in

    def take(self, publish: Publish) -> None:
        """A new picture from control."""
        self._published = publish
        self._at = time.monotonic()
        self._settle()
        self._turned()

    def prepare(self) -> None:
        """The tokenizer is there."""
        self.prepared = True
        self._settle()
        self._turned()

    def _settle(self) -> None:
        if self.prepared and self._published is not None:
            self._settled.set()

    def drain(self) -> None:
        """Take no new work from now on."""
        self._drain_command = True
        self._turned()

    def resume(self) -> None:
        """End a drain."""
        self._drain_command = False
        self._turned()

    def shut_down(self) -> None:
        """The end has come: nothing is taken any more, and requests that are still being received end with `shutting_down`."""
        self.shutting_down = True
        now = asyncio.get_running_loop().time()
        for patience in self._arriving:
            patience.reschedule(now)
        self._turned()

    async def turn(self) -> None:
        """Until something has come in."""
        await self._turn.wait()

    def _turned(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Encloses the receipt of a request's body. Raises RequestError `shutting_down` in there when the end comes first."""
        if self.shutting_down:
            raise shutting_down()
        try:
            async with asyncio.timeout(None) as patience:
                self._arriving.add(patience)
                try:
                    yield
                finally:
                    self._arriving.discard(patience)
        except TimeoutError:
            raise shutting_down() from None

    @property
    def unsettled(self) -> bool:
        """Whether this frontend was restarted beside a running daemon, and has not got its first picture and its tokenizer yet."""
        return self._restarted and not self._settled.is_set() and not self.shutting_down

    async def settled(self) -> None:
        """A frontend that was restarted beside a running daemon waits a moment for its first picture and its tokenizer instead of refusing."""
        if self.unsettled:
            try:
                async with asyncio.timeout(self._boot.args.supervision.control_timeout):
                    await self._settled.wait()
            except TimeoutError:
                return

    # ------------------------------------------------------------ what goes out

    @property
    def state(self) -> str:
        """The daemon's state, `starting` before control has said anything."""
        if self.shutting_down:
            return "stopping"
        if self._drain_command:
            return "draining"
        return self._published.state if self._published else "starting"

    @property
    def draining(self) -> bool:
        """Whether connections are to be closed after each answer."""
        return self.state in _DRAINING

    @property
    def engine_up(self) -> bool:
        """Whether tokens can flow: engine and detokenizer are there."""
        p = self._published
        return p is not None and p.engine_up and p.detokenizer_incarnation > 0

    @property
    def supervision(self) -> SupervisionArgs:
        """How long who waits for what."""
        return self._boot.args.supervision

    @property
    def scheduler_up(self) -> bool:
        """Whether the engine takes requests; its tokens become text once the detokenizer is there too."""
        return self._published is not None and self._published.engine_up

    @property
    def life(self) -> tuple[int, int]:
        """(epoch, detokenizer incarnation): what a running request depends on."""
        p = self._published
        return (p.epoch, p.detokenizer_incarnation) if p else (0, 0)

    @property
    def epoch(self) -> int:
        return self.life[0]

    def refusal(self, *, admitted: bool = False) -> RequestError | None:
        """Why no request may come in now, or None. `admitted`: it was let in before a drain began, which waits for it."""
        state = self.state
        if self.shutting_down:
            return shutting_down()
        if state in _DRAINING and not admitted:
            return RequestError("the server is draining and takes no new requests", code="draining")
        if state in _LOADING or not self.prepared:
            return RequestError(f"the model is not loaded yet ({self.stage or state})", code="loading")
        if state not in ("ready", *_DRAINING) or not self.engine_up:
            return engine_unavailable()
        return None

    @property
    def passing(self) -> bool:
        """Whether an engine that is away is being brought back."""
        return self._published is not None and not self.shutting_down and self.state in _ENGINE_RETURNS

    @property
    def most_held(self) -> int:
        """How many requests may wait for the engine."""
        return self._boot.args.scheduler.max_queued_requests

    @property
    def stage(self) -> str:
        return self._published.stage if self._published else ""

    @property
    def ready(self) -> bool:
        """Whether new requests should be sent here; a stalled engine's are still taken."""
        return self.refusal() is None and not (self._published is not None and self._published.stalled)

    @property
    def started(self) -> bool:
        """Whether start-up is over."""
        return self.prepared and self._published is not None and self._published.state not in (*_LOADING, "failed")

    def health(self, ok: bool) -> dict[str, Any]:
        """Body of the health paths."""
        p = self._published
        state, reason = self.state, p.reason if p is not None else ""
        if not ok and self.unsettled and state not in _DRAINING:
            state = state if p is not None else "recovering"  # it has been ready, or this frontend would not be another one
            reason = reason or f"frontend-{self._rank} is being restarted"
        if not ok and state == "ready":
            state = "loading" if not self.prepared and not self._restarted else "stalled" if self.prepared and p is not None and p.stalled else "recovering"
        body: dict[str, Any] = {
            "status": state,
            "stage": p.stage if p else "starting",
            "progress": p.progress if p else 0.0,
            "reason": reason,
        }
        if p and p.degraded:
            body["degraded"] = list(p.degraded)
        return body

    # ------------------------------------------------------------ facts of the model

    @property
    def weights_version(self) -> str:
        return (self._published.weights_version if self._published else "") or self._boot.files.weights_version

    @property
    def context_length(self) -> int:
        """Prompt and output tokens of one request at most."""
        return self._fact("context_length") or self._boot.args.model.context_length or self._boot.files.context_length

    @property
    def kv_capacity(self) -> int | None:
        """Tokens that the whole KV pool holds, if known."""
        return self._fact("max_total_tokens")

    @property
    def most_running(self) -> int:
        """Requests that run at once; 0: not known yet."""
        return self._fact("max_running_requests") or 0

    def _fact(self, name: str) -> int | None:
        value = self._published.model.get(name) if self._published else None
        return value if isinstance(value, int) and value > 0 else None

    def metrics(self) -> tuple[str, float] | None:
        """(last exposition, its age in seconds)."""
        return (self._published.metrics, time.monotonic() - self._at) if self._published else None


def engine_unavailable() -> RequestError:
    """The error of requests that the engine's loss ends or keeps out."""
    return RequestError("the engine is not available; try again", code="engine_unavailable")


def shutting_down() -> RequestError:
    """The error of requests that the end of the server cuts off."""
    return RequestError("the server is shutting down", code="shutting_down")
