"""A frontend process: HTTP on fd 0 from the first moment, the engine behind it whenever it is there.

It never imports torch or transformers. It ends on SIGTERM alone: a drain comes as a command, while connections go on being taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import zmq

from llmd import failpoints
from llmd.config import ServerArgs
from llmd.errors import EXIT_GAVE_UP, EXIT_OK, LlmdError, ResourceError
from llmd.frontend import turning
from llmd.frontend.accepting import Board
from llmd.frontend.access_log import AccessLog
from llmd.frontend.app import create_app
from llmd.frontend.channels import OutputReceiver, SchedulerPort
from llmd.frontend.commands import farewell, obey
from llmd.frontend.engine_view import EngineView
from llmd.frontend.rates import RateLimits
from llmd.frontend.request_log import RequestLog
from llmd.frontend.runtime import Runtime
from llmd.frontend.server import SEND_BUFFER, FrontendServer, uvicorn_config
from llmd.frontend.shared_use import SharedUse
from llmd.frontend.tables import tables_of
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.pulse import Pulse
from llmd.observability.totals import Meter
from llmd.plan.context import WorkerContext
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.load import Tokenizer, load_tokenizer
from llmd.wire.link import WorkerLink, hello
from llmd.wire.messages import Command, KeyUses, NamesClaimed, Publish, Shared

log = logging.getLogger(__name__)


def run(context: WorkerContext) -> int:
    """Serve until SIGTERM; returns the exit status."""
    try:
        listener = socket.socket(fileno=0)
    except OSError as error:
        raise ResourceError(f"fd 0 of a frontend must be the listening socket: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    failpoints.hit("frontend.http")
    frontend = Frontend(context)
    frontend.server.run(sockets=[listener])
    return frontend.exit_status


class Frontend:
    """The parts of one frontend and their life."""

    def __init__(self, context: WorkerContext) -> None:
        boot = context.boot
        self._context = context
        self.exit_status = EXIT_OK
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._meter = Meter()
        self._pulse = Pulse(always=True)
        self._view = EngineView(boot, restarted=context.incarnation > 1, rank=context.rank)
        self._port = SchedulerPort(self._zmq, boot.ports, lambda rid: self._manager.flights.undeliverable(rid), boot.args.supervision.recover_timeout)
        self._manager = TokenizerManager(context.rank, self._view, self._port, self._meter, boot.args.scheduler.random_seed, context.incarnation)
        self._access_log = AccessLog(
            Path(boot.log_dir) / "access.log",
            role=context.spec.name,
            exclude=boot.args.http.access_log_exclude,
            as_json=boot.args.observability.log_format != "text",
        )
        self._request_log = RequestLog(boot.log_dir, boot.args.observability.request_log)
        self._runtime = Runtime(boot, self._view, self._manager, self._meter, self._access_log, self._request_log)
        self._link = WorkerLink(
            boot.ports.control,
            hello("frontend", context.rank, context.incarnation, context.epoch),
            heartbeat=boot.args.supervision.heartbeat,
            pulse=self._pulse,
            totals=self._meter.snapshot,
            tables=lambda: tables_of(self._manager),
            on_message=self._from_control,
            on_shared=self._from_control,
            introduction=self._manager.names.introduction,
        )
        self._shared_use = SharedUse(context.rank, context.incarnation, self._link.send)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        http = boot.args.http
        self._gate = create_app(self._runtime, self._lifespan(), self._limits() if http.workers > 1 else None)
        self.server = FrontendServer(uvicorn_config(self._gate, keep_alive=http.keep_alive, backlog=http.backlog), self._board())

    def _board(self) -> Board | None:
        boot = self._context.boot
        if boot.args.http.workers == 1:
            return None
        try:
            return Board(boot.ports.connections, boot.args.http.workers, self._context.rank)
        except OSError as error:
            log.warning("connections may be spread unevenly: %s: %s", boot.ports.connections, error.strerror)
            return None

    def _limits(self) -> RateLimits:
        """What is shared with other frontends begins here."""
        self._manager.names.share(self._link.send)
        self._shared_use.limits = RateLimits(time.monotonic, late=self._context.incarnation > 1, on_use=self._shared_use.used)
        return self._shared_use.limits

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        """Nothing slow before the yield: the socket is served from there on."""
        loop = self._loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._spawn(self._stop()))
        endpoint, flights = self._context.boot.ports.tokenizer(self._context.rank), self._manager.flights
        receiver = OutputReceiver(self._zmq, endpoint, flights.receive, self._meter, self._runtime.streams)
        self._access_log.start()
        self._link.start()
        self._spawn(self._prepare())
        self._spawn(turning.beat(self._pulse, lambda: self._context.boot.args.supervision))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            self._shared_use.close()
            receiver.close()
            self._port.close()
            self._manager.executor.shutdown(wait=False, cancel_futures=True)
            self._manager.aside.shutdown(wait=False, cancel_futures=True)
            self._runtime.streams.maker.close()
            self._access_log.close()
            self._request_log.close()
            self._link.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self) -> None:
        """Load tokenizer and chat template beside the first health answers. What cannot be loaded ends the process."""
        self._link.progress("loading tokenizer")
        try:
            tokenizer, template = await asyncio.get_running_loop().run_in_executor(self._manager.executor, self._load)
        except LlmdError as error:
            log.error("%s", error.message)
            self.exit_status = error.exit_status
            self.server.should_exit = True
        except Exception:
            log.exception("the tokenizer cannot be loaded")
            self.exit_status = EXIT_GAVE_UP
            self.server.should_exit = True
        else:
            if template is None:
                log.warning("the model has no chat template: chat requests are refused")
            self._manager.equip(tokenizer, template)
            self._view.prepare()
            self._link.ready({"chat_template": template is not None})

    def _load(self) -> tuple[Tokenizer, ChatTemplate | None]:
        failpoints.hit("frontend.tokenizer")
        small_dir = Path(self._context.boot.files.small_dir)
        return load_tokenizer(small_dir), ChatTemplate.load(small_dir, self._context.boot.args.model.chat_template)

    async def _configure(self, command: Command) -> None:
        """Other values, as a whole: nothing is taken over before all that can fail has not."""
        boot, manager = self._context.boot, self._manager
        try:
            args = msgspec.convert(command.params["args"], ServerArgs)
            template = manager.template
            if args.model.chat_template != boot.args.model.chat_template:
                small_dir = Path(boot.files.small_dir)
                template = await asyncio.get_running_loop().run_in_executor(manager.executor, ChatTemplate.load, small_dir, args.model.chat_template)
        except (LlmdError, msgspec.ValidationError, KeyError) as error:
            self._link.reply(command, code="invalid", message=str(error))
            return
        boot.take(args)
        manager.template = template
        self._gate.configure(args)
        self._access_log.exclude(args.http.access_log_exclude)
        self._request_log.configure(args.observability.request_log)
        self._port.patience = args.supervision.recover_timeout
        self.server.config.timeout_keep_alive = args.http.keep_alive  # type: ignore[assignment]
        self._link.reply(command)

    async def _stop(self) -> None:
        await farewell(self._runtime)
        self.server.should_exit = True

    def _stop_accepting(self) -> None:
        """systemd holds the socket: who connects from now on waits there for the next llmd, instead of being refused."""
        for server in self.server.servers:
            server.close()

    # ------------------------------------------------------------ control's messages

    def _from_control(self, message: Command | Publish | Shared) -> None:
        """In the link's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Command | Publish | Shared) -> None:
        if isinstance(message, Command):
            if message.verb == "configure":
                self._spawn(self._configure(message))
                return
            if message.verb == "drain" and message.params.get("stopping") and self._context.boot.socket_activated:
                self._stop_accepting()
            self._spawn(obey(self._runtime, self._link, message))
            return
        match message:
            case Publish():
                self._view.take(message)
                self._manager.flights.picture_changed()
            case NamesClaimed():
                self._manager.names.answered(message)
            case KeyUses():
                self._shared_use.hear(message)
