"""What control may ask of a scheduler, and the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from llmd.config import ServerArgs
from llmd.observability.process import freeze_gc
from llmd.scheduler.arrivals import Limits
from llmd.scheduler.loop import Scheduler
from llmd.wire.link import WorkerLink
from llmd.wire.messages import Command

log = logging.getLogger(__name__)


class Commands:
    """Called by the scheduler's loop between two steps; each command gets exactly one reply."""

    def __init__(self, scheduler: Scheduler, link: WorkerLink, limits: Callable[[ServerArgs], Limits]) -> None:
        """`limits`: what a configuration makes of them."""
        self._scheduler = scheduler
        self._link = link
        self._limits = limits
        self._verbs: dict[str, Callable[[Command], None]] = {
            "flush": self._flush,
            "frontend_gone": self._frontend_gone,
            "freeze": self._freeze,
            "configure": self._configure,
        }

    def __call__(self, command: Command) -> None:
        """Do it and reply."""
        verb = self._verbs.get(command.verb)
        if verb is None:
            self._link.reply(command, code="not_found", message=f"a scheduler does not know the command {command.verb}")
            return
        try:
            verb(command)
        except Exception as error:
            log.exception("the command %s failed", command.verb)
            self._link.reply(command, code="internal_error", message=f"{command.verb}: {type(error).__name__}")

    def _flush(self, command: Command) -> None:
        """Free all cached KV; refused while anything runs or waits."""
        running, waiting = len(self._scheduler.decode.running), len(self._scheduler.waiting)
        if running or waiting:
            data: dict[str, Any] = {"running": running, "waiting": waiting}
            self._link.reply(command, data, code="busy", message=f"{running} requests run, {waiting} wait")
            return
        self._link.reply(command, {"pages_freed": self._scheduler.kv.flush()})

    def _frontend_gone(self, command: Command) -> None:
        params = command.params
        self._link.reply(command, {"aborted": self._scheduler.frontend_gone(int(params["frontend"]), int(params["incarnation"]))})

    def _configure(self, command: Command) -> None:
        self._scheduler.configure(self._limits(msgspec.convert(command.params["args"], ServerArgs)))
        self._link.reply(command)

    def _freeze(self, command: Command) -> None:
        freeze_gc()
        self._link.reply(command)
