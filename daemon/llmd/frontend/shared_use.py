"""`SharedUse`: tells control what keys with limits have used at this frontend: soon after each use, and again while that matters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from llmd.frontend.rates import RateLimits
from llmd.wire.messages import KeyUse, KeyUses, Message

#: Seconds from a use to the message; what is used meanwhile goes with it.
SOON_S: Final = 0.05
#: Seconds between two messages while a bucket is not full: one may have been lost with a control.
AGAIN_S: Final = 1.0


class SharedUse:
    """Lives in the event loop. `send` goes to control. `limits` is set before the first request."""

    limits: RateLimits

    def __init__(self, frontend: int, incarnation: int, send: Callable[[Message], None]) -> None:
        self._frontend = frontend
        self._incarnation = incarnation
        self._send = send
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False

    def used(self) -> None:
        """There is news."""
        if not self._soon:
            self._soon = True
            self._after(SOON_S)

    def hear(self, message: KeyUses) -> None:
        """What frontends have told, this one too."""
        for use in message.uses:
            if use.frontend != self._frontend:
                self.limits.hear(use)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _after(self, seconds: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tell)

    def _tell(self) -> None:
        self._soon, self._timer = False, None
        keys = self.limits.report()
        if keys:
            self._send(KeyUse(frontend=self._frontend, incarnation=self._incarnation, keys=keys))
            self._after(AGAIN_S)
