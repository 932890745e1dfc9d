"""`Engine`: llmd as a library. It starts the same supervised processes as `llmd run`, without HTTP, and is their only client.

    with Engine(model_path="smollm2-135m-instruct") as engine:
        print(engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 16})["text"])

Everything may be called from any thread, also from within a running event loop. It installs no signal handler, sets up no logging, changes no
environment, and leaves no file or process behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from llmd import __version__
from llmd.config import ServerArgs
from llmd.config.check import check_args
from llmd.engine import admin
from llmd.engine.arguments import path as absolute_path
from llmd.engine.arguments import plain, seconds
from llmd.engine.generate import Answer, Job, generate
from llmd.engine.life import Life
from llmd.errors import EXIT_GAVE_UP, ConfigError, EngineDead, StartupError
from llmd.frontend.native.params import Asked

#: A call of the admin plane that waits for nothing.
_QUICK_S: Final = 30.0


class Engine:
    """One llmd of the caller's own. See the module, and docs/python-api.md."""

    def __init__(self, *, server_args: ServerArgs | None = None, allow_failpoints: bool = False, **kwargs: Any) -> None:
        """Start it, and return when it can generate. `kwargs`: SGLang's names, as `ServerArgs.from_kwargs` takes them.

        Raises StartupError, and then nothing of the start is left; UsageError for a name that llmd does not know.
        """
        if server_args is not None and kwargs:
            raise TypeError("give either server_args or keyword arguments")
        try:
            args = _for_engine(server_args if server_args is not None else ServerArgs.from_kwargs(**kwargs))
            check_args(args, allow_failpoints=allow_failpoints)
        except ConfigError as error:
            raise StartupError("configuration", error.exit_status, error.message) from None
        if sys.is_finalizing() or not threading.main_thread().is_alive():
            raise StartupError("spawn", EXIT_GAVE_UP, "the interpreter is shutting down")
        self._life = Life(args, allow_failpoints=allow_failpoints)
        # Also when the caller forgets: at the interpreter's end, or when the Engine is collected, be it of an interrupt right behind its start.
        self._finalizer = weakref.finalize(self, self._life.stop)
        self._life.start()

    # ------------------------------------------------------------ generating

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        return_text_in_logprobs: bool = False,
        stream: bool = False,
    ) -> Any:
        """Generate for one prompt or a batch; `stream` gives an iterator of what there is so far. Raises RequestError, EngineDead."""
        asked = Asked(
            prompt=plain(prompt),
            input_ids=plain(input_ids),
            sampling_params=plain(sampling_params),
            return_logprob=plain(return_logprob),
            logprob_start_len=plain(logprob_start_len),
            top_logprobs_num=plain(top_logprobs_num),
        )
        self._life.check()
        if stream:
            return self._iterate(self._job(asked, return_text_in_logprobs))
        return self._life.call(self._whole(asked, return_text_in_logprobs))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        return_text_in_logprobs: bool = False,
        stream: bool = False,
    ) -> Any:
        """`generate` for a caller's event loop; with `stream`, `await` gives an async iterator. Cancelling aborts the request."""
        asked = Asked(
            prompt=plain(prompt),
            input_ids=plain(input_ids),
            sampling_params=plain(sampling_params),
            return_logprob=plain(return_logprob),
            logprob_start_len=plain(logprob_start_len),
            top_logprobs_num=plain(top_logprobs_num),
        )
        self._life.check()
        if stream:
            return self._aiterate(self._job(asked, return_text_in_logprobs))
        return await asyncio.wrap_future(self._life.submit(self._whole(asked, return_text_in_logprobs)))

    async def _whole(self, asked: Asked, with_text: bool) -> Answer:
        assert self._life.frontend is not None
        return await generate(self._life.frontend, asked, with_text=with_text)

    def _job(self, asked: Asked, with_text: bool) -> Job:
        assert self._life.frontend is not None
        return Job(self._life.frontend, asked, streamed=True, with_text=with_text)

    def _iterate(self, job: Job) -> Iterator[dict[str, Any]]:
        error: BaseException | None = None
        try:
            self._life.call(job.begin())
            while pieces := self._life.call(job.pieces()):
                yield from pieces
        except EngineDead as dead:
            error = job.ended_with() or dead
            raise error from None
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._life.post(_close(job, error))

    async def _aiterate(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        error: BaseException | None = None
        try:
            await asyncio.wrap_future(self._life.submit(job.begin()))
            while pieces := await asyncio.wrap_future(self._life.submit(job.pieces())):
                for piece in pieces:
                    yield piece
        except EngineDead as dead:
            error = job.ended_with() or dead
            raise error from None
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._life.post(_close(job, error))

    # ------------------------------------------------------------ administration

    def flush_cache(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Forget all cached prefixes: `{"pages_freed": n}`. Raises RequestError `busy` while requests run, unless `timeout_s` waits for them."""
        wait = seconds("timeout_s", timeout_s)
        return self._change("flush", {} if wait is None else {"timeout_s": wait}, _QUICK_S + (wait or 0.0))

    def update_weights(self, path: str | os.PathLike[str], *, version: str | None = None, mode: str | None = None) -> dict[str, Any]:
        """Load other weights of the same shape: `{"weights_version", "epoch"}`. Requests wait meanwhile.

        `mode`: what happens to running ones, `drain` (they finish first), `abort` or `now`. If the new weights fail, the old ones come back
        and RequestError says why.
        """
        supervision, reload = self._args.supervision, self._args.reload
        body = {"path": absolute_path("path", path), "version": version, "mode": mode}
        timeout = 2 * supervision.startup_timeout + reload.timeout + _QUICK_S
        return self._change("reload", {name: value for name, value in body.items() if value is not None}, timeout)

    def get_server_info(self) -> dict[str, Any]:
        """The configuration in effect, the model, and what `llmctl status` shows."""
        status = self._call("GET", "/v1/status", None, _QUICK_S)
        return status | {
            "version": __version__,
            "pid": self._life.pid,
            "server_args": msgspec.to_builtins(self._args),
            "weights": self._call("GET", "/v1/weights"),
        }

    @property
    def _args(self) -> ServerArgs:
        assert self._life.frontend is not None
        return self._life.frontend.side.boot.args

    def _change(self, verb: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        return dict(self._call("POST", f"/v1/{verb}", body, timeout).get("data") or {})

    def _call(self, method: str, target: str, body: dict[str, Any] | None = None, timeout: float = _QUICK_S) -> dict[str, Any]:
        self._life.check()
        return admin.call(self._life.ports.admin_socket, method, target, body, timeout=timeout)

    # ------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Stop everything; requests that run end with `shutting_down`. Returns when nothing is left. Idempotent; one that was interrupted goes on."""
        self._life.stop()
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


async def _close(job: Job, error: BaseException | None) -> None:
    job.close(error)


def _for_engine(args: ServerArgs) -> ServerArgs:
    """Where nothing else was asked for: a quiet log, and no limits that protect a server from strangers."""
    default, scheduler, observability = ServerArgs(), args.scheduler, args.observability
    if scheduler.max_queued_requests == default.scheduler.max_queued_requests:
        scheduler = replace(scheduler, max_queued_requests=2**31 - 1)
    if scheduler.queue_timeout == default.scheduler.queue_timeout:
        scheduler = replace(scheduler, queue_timeout=None)
    if observability.log_level == default.observability.log_level:
        observability = replace(observability, log_level="error")
    if observability.log_format == default.observability.log_format:
        observability = replace(observability, log_format="text")
    reload = args.reload if args.reload.allowed_dirs is not None else replace(args.reload, allowed_dirs=("/",))
    admin_args = replace(args.admin, socket=None)  # its place is the private run directory
    return replace(args, scheduler=scheduler, observability=observability, reload=reload, admin=admin_args)
