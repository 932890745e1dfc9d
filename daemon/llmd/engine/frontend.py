"""`EmbeddedFrontend`: frontend 0 in the caller's process. The parts are a frontend's own (llmd.frontend), without HTTP.

It lives in the Engine's thread. Of the caller's process it takes nothing: a ZMQ context of its own, no signal handler, no logging setup,
no frozen heap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import zmq

from llmd.errors import RequestError
from llmd.frontend import turning
from llmd.frontend.channels import OutputReceiver, SchedulerPort
from llmd.frontend.commands import obey
from llmd.frontend.engine_view import EngineView
from llmd.frontend.runtime import EngineSide
from llmd.frontend.tables import tables_of
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.plan.spec import Boot
from llmd.tokenizer.load import load_tokenizer
from llmd.wire.link import WorkerLink, hello
from llmd.wire.messages import Command, Publish

log = logging.getLogger(__name__)

#: Why a request waits instead of being refused: each of these passes.
_PASSING: Final = frozenset({"loading", "draining", "engine_unavailable"})


class EmbeddedFrontend:
    """See the module. `on_news` is called for each word of control."""

    def __init__(self, boot: Boot, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pulse = Pulse(always=True)
        view, meter = EngineView(boot, restarted=False), Meter()
        self._port = SchedulerPort(self._zmq, boot.ports, self._undeliverable, boot.args.supervision.recover_timeout)
        manager = TokenizerManager(0, view, self._port, meter, boot.args.scheduler.random_seed)
        self.side = EngineSide(boot, view, manager, meter)
        self._receiver = OutputReceiver(self._zmq, boot.ports.tokenizer(0), manager.flights.receive, meter)
        self._link = WorkerLink(
            boot.ports.control,
            hello("frontend", 0, 1, 1),
            heartbeat=boot.args.supervision.heartbeat,
            pulse=self._pulse,
            totals=meter.snapshot,
            tables=lambda: tables_of(manager),
            on_message=self._from_control,
            context=self._zmq,
        )
        self._turn = asyncio.Event()
        self._over: RequestError | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._link.start()
        self._spawn(turning.beat(self._pulse, lambda: boot.args.supervision))

    async def prepare(self) -> None:
        """Load the tokenizer, and say Ready. Raises LlmdError."""
        small_dir = Path(self.side.boot.files.small_dir)
        tokenizer = await self._loop.run_in_executor(self.side.manager.executor, load_tokenizer, small_dir)
        self.side.manager.equip(tokenizer, None)
        self.side.view.prepare()
        self._link.ready({"chat_template": False})
        self._turned()

    async def admitted(self, patience: float) -> None:
        """Wait until requests may come in. Raises the refusal that stays, or that has not passed after `patience` seconds."""
        deadline = time.monotonic() + patience
        while (refusal := self.side.view.refusal()) is not None:
            self.check()
            left = deadline - time.monotonic()
            if refusal.code not in _PASSING or left <= 0:
                raise refusal
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._turn.wait()
        self.check()

    def check(self) -> None:
        """Raise what everything has ended with, if it has."""
        if self._over is not None:
            raise self._over.copy()

    def fail(self, error: RequestError) -> None:
        """End every request with `error`, those to come as well: nobody is left who would answer them."""
        self._over = error
        self.side.manager.flights.fail_all(error)
        self._turned()

    async def close(self) -> None:
        """Give everything back."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._receiver.close()
        self._port.close()
        self._link.close()
        self.side.manager.executor.shutdown(wait=True, cancel_futures=True)
        self._zmq.term()

    def _undeliverable(self, rid: str) -> None:
        self.side.manager.flights.undeliverable(rid)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _from_control(self, message: Command | Publish) -> None:
        """In the link's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Command | Publish) -> None:
        if self._closed:
            return  # it was on its way here, and would open what has been given back
        view = self.side.view
        if isinstance(message, Command):
            if message.verb == "freeze":
                self._link.reply(message)  # the heap is the caller's
            else:
                self._spawn(self._obey(message))
            return
        view.take(message)
        self.side.manager.flights.picture_changed()
        self._turned()

    async def _obey(self, command: Command) -> None:
        await obey(self.side, self._link, command)
        self._turned()

    def _turned(self) -> None:
        """Whoever waits looks again."""
        self._on_news()
        self._turn.set()
        self._turn = asyncio.Event()
