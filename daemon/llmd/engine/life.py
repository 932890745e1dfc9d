"""`Life`: one thread with an event loop, in which an Engine's child is started, watched and stopped. Any thread may hand it work.

Everything that was begun is undone before the thread ends, whether the start failed, the child died or the caller shut it down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from llmd.config import ServerArgs
from llmd.engine import rundir
from llmd.engine.child import Order
from llmd.engine.frontend import EmbeddedFrontend
from llmd.engine.process import Child
from llmd.errors import (
    EXIT_CONFIG,
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESOURCE,
    EXIT_USAGE,
    EngineDead,
    LlmdError,
    RequestError,
    StartupError,
)
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot

T = TypeVar("T")

#: How long the child may take to stop before it is killed.
STOP_S: Final = 5.0
#: Beyond supervision.startup_timeout, which control and supervisor keep themselves: then they are no longer believed.
GRACE_S: Final = 60.0

_FORKED: Final = "this Engine belongs to the process that made it, not to a fork of it"


class Life:
    """See the module. `start` blocks until it is ready or has failed; `stop` until nothing of it is left."""

    def __init__(self, args: ServerArgs, *, allow_failpoints: bool) -> None:
        self._args = args
        self._allow_failpoints = allow_failpoints
        self._owner = os.getpid()
        self._ready: Future[None] = Future()
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._over = threading.Event()
        self._stage = "spawn"
        self._failed_at = ""
        self._news_at = 0.0
        self._dead: EngineDead | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: Child | None = None
        self.frontend: EmbeddedFrontend | None = None
        self._booted = asyncio.Event()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="llmd-engine", daemon=True)

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Raises StartupError, and then nothing is left of it."""
        try:
            self._run_dir = rundir.make()
        except LlmdError as error:
            raise StartupError("run directory", error.exit_status, error.message) from None
        try:
            try:
                self._thread.start()
            except RuntimeError as error:
                rundir.remove(self._run_dir)
                raise StartupError("spawn", EXIT_RESOURCE, str(error)) from None
            self._ready.result()
        except BaseException:  # an interrupt may come as early as between the thread and its loop
            self.stop()
            raise

    def stop(self) -> None:
        """End it. Idempotent; in a forked copy of the caller it does nothing, for the Engine is not the copy's."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._loop is None:
                self._stopping.set()  # the thread finds it when it comes so far
            elif not self._closed:
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread is threading.current_thread() or self._thread.ident is None:
            return
        # Not by join alone: one that is interrupted takes the thread for ended (bpo-45274), and the next call would not wait.
        self._over.wait()
        self._thread.join()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop. Raises EngineDead when that is over."""
        if os.getpid() != self._owner:
            work.close()
            raise EngineDead(_FORKED)
        with self._lock:
            if self._closed or self._loop is None:
                work.close()
                raise self._dead or EngineDead("this Engine has been shut down")
            return asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """`submit`, and wait for the result."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Coroutine[Any, Any, Any]) -> None:
        """`submit`, and forget: whether it is over or not does not matter."""
        with contextlib.suppress(EngineDead):
            self.submit(work)

    @property
    def ports(self) -> PortArgs:
        return PortArgs(str(self._run_dir))

    @property
    def pid(self) -> int:
        """The child's."""
        assert self._child is not None
        return self._child.pid

    def check(self) -> None:
        """Raise EngineDead if the child is no more, or is not this process's."""
        if os.getpid() != self._owner:
            raise EngineDead(_FORKED)
        if self._dead is not None:
            raise EngineDead(self._dead.message)
        if self._closed or self._stopping.is_set():
            raise EngineDead("this Engine has been shut down")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            loop = asyncio.new_event_loop()
        except OSError as error:  # no descriptors left
            rundir.remove(self._run_dir)
            self._ready.set_exception(StartupError("spawn", EXIT_RESOURCE, f"{error.strerror or error}"))
            self._over.set()
            return
        try:
            with self._lock:
                self._loop = loop
            loop.run_until_complete(self._live())
        finally:
            with self._lock:
                self._closed = True
            _finish(loop)
            rundir.remove(self._run_dir)
            if not self._ready.done():
                self._ready.set_exception(StartupError(self._stage, EXIT_GAVE_UP, "interrupted"))
            self._over.set()

    async def _live(self) -> None:
        failure: StartupError | None = None
        try:
            await self._start()
        except StartupError as error:
            failure = error
        except Exception as error:
            failure = StartupError(self._stage, EXIT_GAVE_UP, f"{type(error).__name__}: {error}")
        else:
            self._ready.set_result(None)
            await self._stopping.wait()
        await self._undo()
        if failure is not None:
            self._ready.set_exception(failure)

    async def _start(self) -> None:
        self._news("spawn")
        if self._stopping.is_set():
            raise StartupError(self._stage, EXIT_GAVE_UP, "interrupted")
        args = replace(self._args, run_dir=str(self._run_dir), **_private_dirs(self._args, self._run_dir))
        try:
            self._child = Child(Order(args, self._allow_failpoints), on_stage=self._on_stage, on_end=self._on_end)
        except OSError as error:
            raise StartupError("spawn", EXIT_RESOURCE, f"{error.strerror or error}") from None
        await self._until(self._booted.is_set)
        try:
            self.frontend = EmbeddedFrontend(Boot.load(self.ports.boot.read_bytes()), self._on_news)
            await self.frontend.prepare()
        except Exception as error:
            if not self.ports.boot.exists():
                await self._until(lambda: False)  # the child is ending and has cleared up: its own words say why
            if isinstance(error, LlmdError):
                raise StartupError("tokenizer", error.exit_status, error.message) from None
            raise
        await self._until(lambda: self.frontend is not None and self.frontend.side.view.ready)
        self._child.speak()

    async def _until(self, over: Callable[[], bool]) -> None:
        """Wait for `over()`. Raises StartupError when the child ends first, or nothing moves for too long."""
        assert self._child is not None
        limit = self._args.supervision.startup_timeout + GRACE_S
        while not over():
            if self._child.watchdog.ended:
                words = self._child.last_words()  # and its last stages
                raise StartupError(self._failed_at or self._stage, _documented(self._child.watchdog.status), words or f"llmd {self._child.watchdog.describe()}")
            if self._stopping.is_set():
                raise StartupError(self._stage, EXIT_GAVE_UP, "interrupted")
            if time.monotonic() - self._news_at > limit:
                raise StartupError(self._stage, EXIT_GAVE_UP, f"nothing has moved for {limit:g} s")
            self._changed.clear()
            waiting = [asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self._stopping.wait())]
            await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()

    async def _undo(self) -> None:
        if self.frontend is not None:
            self.frontend.fail(self._dead or RequestError("the engine is being shut down", code="shutting_down"))
        if self._child is not None:
            await self._child.stop(STOP_S)
        if self.frontend is not None:
            await self.frontend.close()
        if self._child is not None:
            self._child.close()

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that the end of the loop cancels ends with EngineDead: the caller has cancelled nothing."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise EngineDead("this Engine has been shut down") from None
            raise

    # ------------------------------------------------------------ what happens

    def _news(self, stage: str) -> None:
        if stage != self._stage or not self._news_at:
            self._news_at = time.monotonic()
        self._stage = stage
        self._changed.set()

    def _on_stage(self, stage: str) -> None:
        if self._booted.is_set():
            self._failed_at = stage  # its last word; until then control tells how far the start is
        elif stage == "boot":
            stage = "processes"
            self._booted.set()
        self._news(stage)

    def _on_news(self) -> None:
        assert self.frontend is not None
        view = self.frontend.side.view
        self._news(view.stage or view.state)

    def _on_end(self) -> None:
        """The child is gone: nothing that runs or comes will be answered."""
        self._changed.set()
        if self._child is not None and not self._stopping.is_set():
            self._dead = EngineDead(f"llmd (pid {self._child.pid}), which this Engine had started, {self._child.watchdog.describe()}")
            if self.frontend is not None:
                self.frontend.fail(self._dead)


def _documented(status: int) -> int:
    """`status` if it is one of llmd's or a signal's; whatever else an interpreter may end with is an internal error."""
    return status if status < 0 or status in (EXIT_OK, EXIT_USAGE, EXIT_GAVE_UP, EXIT_RESOURCE, EXIT_CONFIG, EXIT_INTERRUPTED) else EXIT_GAVE_UP


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """End what is left in the loop, then the loop."""
    loop.run_until_complete(asyncio.sleep(0))  # work that was handed over in the last moment becomes a task, and so gets an answer
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _private_dirs(args: ServerArgs, run_dir: Path) -> dict[str, str]:
    """Logs and records go with the run directory, unless the caller wants them somewhere."""
    return {"state_dir": args.state_dir or str(run_dir / "state"), "log_dir": args.log_dir or str(run_dir / "log")}
