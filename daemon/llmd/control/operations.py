"""Administrative operations: who may run beside whom, their records, their audit lines.

At most one operation that replaces the engine runs at a time, and one flush; whatever conflicts is refused, never queued.
What a verb does is in llmd.control.verbs and llmd.control.reload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from llmd.control import audit, audit_line, config_reload, plans, reload, succession, verbs
from llmd.control.channel import RankReply
from llmd.control.core import Core
from llmd.control.effects import Effect, effects, facts
from llmd.control.events import Severity
from llmd.control.operation import Conflict, Operation, OperationFailed, OperationState, refusal, replay, stopped
from llmd.control.params import convert
from llmd.control.peer import Peer
from llmd.control.state_file import Began
from llmd.control.supervisor_client import OutcomeUnknown, SupervisorAway
from llmd.errors import RequestError

log = logging.getLogger("llmd.control")

#: Operations that are remembered for GET /v1/operations, and those of them that survive control.
KEPT = 200
SAVED = 30

#: Seconds that a verb waits for a control that has just been replaced to know how things are.
SETTLED_WITHIN = 5.0

#: Verbs that replace the engine, or may; each excludes all others but those that are unhindered.
ENGINE_VERBS = frozenset({"reload", "restart", "config/reload"})

#: Those of them that always do: a flush that waits ends, as there will be nothing to forget.
REPLACING = frozenset({"reload", "restart"})

#: Verbs that wait for nobody: what others wait for may be just what these end.
UNHINDERED = frozenset({"stop", "abort", "log-level"})

#: Verbs that may do nothing but wait for their caller: they end when it hangs up.
WAITING_VERBS = frozenset({"flush", "drain"})

#: Seconds between two audit attempts while the disk refuses, and until an end is asked for again (asyncio may lose a cancellation).
RETRY_AUDIT = 5.0
END_AGAIN = 1.0


class Operations:
    """See the module. `save` returns when what is remembered is on disk."""

    def __init__(self, core: Core, save: Callable[[], Awaitable[None]]) -> None:
        self._core = core
        self._save = save
        self._kept: deque[Operation] = deque((msgspec.convert(record, Operation) for record in core.remembered.operations), maxlen=KEPT)
        self._running: list[Operation] = []
        self._waiting: dict[str, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        """Those that run an operation, or are about to."""
        self._ended: dict[asyncio.Task[Any], RequestError] = {}
        """Tasks that were ended -> what their callers are told."""
        self._left = [operation for operation in self._kept if not operation.over]
        """What a control before this one was doing, until it is taken up."""
        self._by_key = {operation.key: asyncio.get_running_loop().create_future() for operation in self._left if operation.key is not None}
        self.audit = audit.AuditFile(Path(core.boot.state_dir) / "audit.jsonl")
        self._paying = False
        self._settled = not core.resumed
        self._taken_up = not self._left

    def newest_first(self) -> list[Operation]:
        """Newest first."""
        return list(reversed(self._kept))

    def get(self, number: str) -> Operation | None:
        return next((o for o in self._kept if o.id == number), None)

    async def plan(self, verb: str, raw: dict[str, Any]) -> dict[str, Any]:
        """What `run` would do now. Changes nothing. Raises RequestError where it would be refused."""
        await self._core.until(lambda: self._settled, time.monotonic() + SETTLED_WITHIN)
        params = self._params(verb, raw)
        self._conflicts(verb)
        made = await plans.PLAN[verb](self._core, params)
        return made.shown()

    async def run(
        self, verb: str, raw: dict[str, Any], peer: Peer, reason: str = "", key: str | None = None, begun: asyncio.Future[Operation] | None = None
    ) -> Operation:
        """Run a verb to its end. Raises OperationFailed; whatever happens, there is one audit line. `begun` gets the record once there is one.

        With a `key` that was used before, nothing is run: the answer is that operation's, for which this waits if it goes on."""
        if key is None:
            return await self._run(verb, raw, peer, reason, None, begun)
        while (running := self._by_key.get(key)) is not None:
            await asyncio.wait([running])
        earlier = next((o for o in reversed(self._kept) if o.key == key), None)
        if earlier is not None:
            return replay(earlier, verb, raw)
        over = self._by_key[key] = asyncio.get_running_loop().create_future()
        try:
            return await self._run(verb, raw, peer, reason, key, begun)
        finally:
            del self._by_key[key]
            over.set_result(None)

    async def _run(self, verb: str, raw: dict[str, Any], peer: Peer, reason: str, key: str | None, begun: asyncio.Future[Operation] | None) -> Operation:
        task = asyncio.current_task()
        assert task is not None, "this is a coroutine"
        operation: Operation | None = None
        self._tasks.add(task)
        try:
            await self._core.until(lambda: self._settled, time.monotonic() + SETTLED_WITHIN)
            params = self._params(verb, raw)
            for flush in self._conflicts(verb):  # a new engine has nothing to forget
                self.end(flush, RequestError(f"a {verb} replaces the engine, and all that a flush would have it forget", code="aborted"))
            operation = Operation(id=f"op-{secrets.token_hex(6)}", verb=verb, params=raw, reason=reason, started_at=time.time(), by=peer, key=key)
            if isinstance(params, verbs.FlushParams) and params.timeout_s:
                self._waiting[operation.id] = task
            if begun is not None:
                begun.set_result(operation)
            await self._execute(operation, params)
        except RequestError as error:
            await self._audited(peer, verb, raw, reason, operation, error)
            raise OperationFailed(error, operation) from None
        except asyncio.CancelledError:
            ended = self._ended.pop(task, None)
            self.audit.append(audit_line.line(peer, verb, raw, reason, operation, ended or RequestError("control ends", code="aborted")))
            if ended is None:
                raise
            raise OperationFailed(ended, operation) from None
        except Exception as error:
            fault = self._fault(error, verb, operation)
            await self._audited(peer, verb, raw, reason, operation, fault)
            raise OperationFailed(fault, operation) from None
        finally:
            if operation is not None:
                self._waiting.pop(operation.id, None)
            self._ended.pop(task, None)
            self._tasks.discard(task)
        await self._audited(peer, verb, raw, reason, operation, None)
        return operation

    def end(self, task: asyncio.Task[Any], error: RequestError) -> None:
        """End what `task` runs: it fails with `error`."""
        if task.done():
            return
        self._ended[task] = error
        task.cancel()
        asyncio.get_running_loop().call_later(END_AGAIN, lambda: self._ended.get(task) and task.cancel())

    async def end_all(self, within: float) -> None:
        """Control ends: so does all that runs, within so many seconds, and whoever waits for it is told why."""
        running = list(self._tasks)
        for task in running:
            self.end(task, stopped() if self._core.stopping else RequestError("control ends", code="aborted"))
        if running:
            await asyncio.wait(running, timeout=within)

    async def take_up(self) -> None:
        """Finish what a control before this one had begun. Called once, when the picture is whole."""
        left, self._left = self._left, []
        self._running += left  # and from here on they are in the way of others, as before
        self._settled = True
        await asyncio.gather(*map(self._take_up, left))
        self._remember()
        self._taken_up = True

    async def _take_up(self, operation: Operation) -> None:
        extra = {"operation_id": operation.id}
        log.warning("taking up the %s that the control before this one had begun", operation.verb, extra=extra)
        task, error = asyncio.current_task(), None
        assert task is not None, "this is a coroutine"
        self._tasks.add(task)
        if operation.verb == "flush":
            self._waiting[operation.id] = task
        try:
            await self._execute(operation, None)
        except RequestError as refused:
            error = refused
        except asyncio.CancelledError:
            if (error := self._ended.pop(task, None)) is None:
                raise
        except Exception as fault:
            error = self._fault(fault, operation.verb, operation)
        finally:
            self._waiting.pop(operation.id, None)
            self._tasks.discard(task)
            if operation.key in self._by_key:
                self._by_key.pop(operation.key).set_result(None)
        if error is not None:
            log.error("%s: %s", operation.verb, error.message, extra=extra)
        await self._audited(operation.by, operation.verb, operation.params, operation.reason, operation, error)

    async def on_hangup(self) -> None:
        """SIGHUP: read the configuration again. Whoever sent it is not known, and reads the outcome in the log."""
        await self._core.until(lambda: self._taken_up, math.inf)
        try:
            await self.run("config/reload", {}, Peer(), "SIGHUP")
        except OperationFailed as error:
            for line in error.message.splitlines():
                log.error("SIGHUP: %s", line)
            if error.hint:
                log.error("SIGHUP: %s", error.hint)

    # ------------------------------------------------------------ within

    @staticmethod
    def _params(verb: str, raw: dict[str, Any]) -> Any:
        kind = verbs.VERBS.get(verb)
        if kind is None:
            raise RequestError(f"there is no verb {verb[:64]!r}; there are {', '.join(verbs.VERBS)}", param="verb")
        return convert(raw, kind)

    def _conflicts(self, verb: str) -> list[asyncio.Task[Any]]:
        """Raises Conflict. Returns the waiting flushes that this verb ends."""
        if verb in UNHINDERED:
            return []
        flushes = []
        for other in self._running:
            if other.verb in ENGINE_VERBS:
                code = "reload_in_progress" if other.verb == "reload" else "busy"
                raise Conflict(f"operation {other.id} ({other.verb}) runs; try again when it is done", code, other)
            if other.verb == verb == "flush":
                raise Conflict(f"operation {other.id} flushes already", "flush_in_progress", other)
            if verb in REPLACING and other.verb == "flush":
                if other.id not in self._waiting:
                    raise Conflict(f"operation {other.id} ({other.verb}) runs; try again when it is done", "busy", other)
                flushes.append(self._waiting[other.id])
        return flushes

    async def _execute(self, operation: Operation, params: Any) -> None:
        """Run it, keep its record; without `params`, finish what an earlier control has begun. Raises RequestError."""
        began = self._core.remembered.began.get(operation.id) if params is None else None
        began = began or Began(at=time.monotonic(), epoch=self._core.epoch, facts=facts(self._core, operation.verb))
        if params is not None:
            self._begin(operation, began)
            with contextlib.suppress(OSError):  # the log has it
                await self._save()
        try:
            await self._dispatch(operation, params, began)
            operation.state = "succeeded"
        except SupervisorAway as error:
            fault = stopped() if self._core.stopping else RequestError(_about_supervisor(error, operation.verb), code="engine_unavailable")
            fault.hint = fault.hint or "see `llmctl status`"
            operation.outcome = "unknown" if isinstance(error, OutcomeUnknown) else "known"
            self._failed(operation, "failed", fault.message, fault.code)
            raise fault from None
        except reload.RolledBack as error:
            self._failed(operation, "rolled_back", error.message, error.code)
            raise
        except RequestError as error:
            partial = any(r.ok for r in operation.results) and not all(r.ok for r in operation.results)
            self._failed(operation, "partial" if partial else "failed", error.message, error.code)
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            told = self._ended.get(task) if task else None
            self._failed(operation, "failed", told.message if told else "control ends", told.code if told else "aborted")
            raise
        except BaseException as error:
            self._failed(operation, "failed", _text_of(error), "internal_error")
            raise
        finally:
            operation.finished_at = time.time()
            operation.changes += effects(began.facts, facts(self._core, operation.verb))
            self._running.remove(operation)
            self._core.remembered.began.pop(operation.id, None)
            self._remember()
            self._core.ledger.inc("llmd_operations_total", verb=operation.verb, result=operation.state)
            ended = f"{operation.verb}: {operation.state}{f': {operation.message}' if operation.message else ''}"
            log.info("%s", ended.replace("\n", "; "), extra={"operation_id": operation.id})
            self._tell(operation, ended)
            self._core.changed.set()

    def _begin(self, operation: Operation, began: Began) -> None:
        self._kept.append(operation)
        self._running.append(operation)
        operation.state = "running"
        self._core.remembered.began[operation.id] = began
        self._remember()
        log.info("%s begins", operation.verb, extra={"operation_id": operation.id})
        self._tell(operation, f"{operation.verb} begins")

    async def _dispatch(self, operation: Operation, params: Any, began: Began) -> None:
        def keep(replies: list[RankReply]) -> None:
            operation.results = replies

        if params is None:
            operation.data = await succession.finish(self._core, operation, began, keep, self._save)
            return
        made = await plans.PLAN[operation.verb](self._core, params)
        operation.plan = made.shown()
        operation.changes = [Effect(change["key"], change["before"], change["after"]) for change in made.changes]
        if made.refused is not None:
            raise refusal(made.refused)
        if operation.verb == "config/reload":
            operation.data = await config_reload.run(self._core, made, keep, self._save)
        elif operation.verb == "reload":
            operation.data = await reload.run(self._core, params, made, keep, self._save)
        else:
            operation.data = await verbs.RUN[operation.verb](self._core, params, keep)

    def _tell(self, operation: Operation, what: str) -> None:
        severity: Severity = "error" if operation.over and operation.state != "succeeded" else "info"
        by = operation.by.loginuid if operation.by.loginuid is not None else operation.by.uid
        self._core.events.emit(
            "operation",
            what,
            severity=severity,
            operation_id=operation.id,
            verb=operation.verb,
            state=operation.state,
            uid=by,
            key=operation.by.key,
            reason=operation.reason,
        )

    @staticmethod
    def _failed(operation: Operation, state: OperationState, message: str, code: str | None = None) -> None:
        operation.state, operation.message, operation.code = state, message, code

    def _remember(self) -> None:
        current = next((o for o in self._running if o.verb in ENGINE_VERBS), None) or (self._running[-1] if self._running else None)
        self._core.remembered.operation = msgspec.to_builtins(current) if current else None
        kept = list(self._kept)
        saved = [operation for operation in kept[:-SAVED] if not operation.over] + kept[-SAVED:]
        self._core.remembered.operations = [msgspec.to_builtins(operation) for operation in saved]

    @staticmethod
    def _fault(error: Exception, verb: str, operation: Operation | None) -> RequestError:
        """What the caller is told of an error that no verb foresees. The operating system's refusals are no fault of ours."""
        extra = {"operation_id": operation.id} if operation else {}
        if isinstance(error, OSError):
            log.error("%s: %s", verb, _text_of(error), extra=extra)
        else:
            log.error("%s failed", verb, exc_info=error, extra=extra)
        return RequestError(_text_of(error), code="internal_error")

    async def _audited(self, peer: Peer, verb: str, raw: dict[str, Any], reason: str, operation: Operation | None, error: RequestError | None) -> None:
        data = audit_line.line(peer, verb, raw, reason, operation, error)
        await asyncio.get_running_loop().run_in_executor(None, self.audit.append, data)
        if self.audit.owes and not self._paying:
            self._paying = True
            self._core.spawn(self._pay(), "audit lines")

    async def _pay(self) -> None:
        """Write the audit lines that the disk has refused as soon as it takes them."""
        while self.audit.owes:
            await asyncio.sleep(RETRY_AUDIT)
            await asyncio.get_running_loop().run_in_executor(None, self.audit.append)
        self._paying = False


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot write {error.filename}: {error.strerror}" if error.filename else f"the operating system refuses: {error.strerror}"
    return "internal error; the log has more"


def _about_supervisor(error: SupervisorAway, verb: str) -> str:
    if isinstance(error, OutcomeUnknown):
        return f"the supervisor has not answered in time, and whether it will carry out the {verb} is not known: {error}"
    return f"the supervisor does not answer: {error}"
