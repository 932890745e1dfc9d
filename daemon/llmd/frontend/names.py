"""`Names`: the names that clients give their requests. One runs once, here and, as far as control can be asked, at every other frontend."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from llmd.errors import RequestError
from llmd.wire.messages import ClaimNames, Message, NamesClaimed, ReleaseNames

log = logging.getLogger(__name__)

#: Seconds that a request waits for control's word; without it, what this frontend knows counts.
CLAIM_S: Final = 1.0

#: Seconds between tries to get a name: a client that has the last byte of its answer may send the next request of that name
#: before the frontend that wrote it, and control, have noted the end.
RELEASE_S: Final = (0.03, 0.1, 0.0)


class Names:
    """Alone until `share` is called."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._send: Callable[[Message], None] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def share(self, send: Callable[[Message], None]) -> None:
        """There are other frontends: `send` goes to control."""
        self._send = send

    def introduction(self) -> list[Message]:
        """What a new control has to know. Any thread may ask."""
        held = tuple(self._held)
        return [ClaimNames(id=0, names=held)] if held and self._send is not None else []

    @contextlib.asynccontextmanager
    async def held(self, names: tuple[str, ...]) -> AsyncIterator[None]:
        """Encloses the requests of these names. Raises RequestError where one is taken by what runs, or twice."""
        if len(set(names)) < len(names):
            raise _taken()
        for pause in RELEASE_S:
            if await self._take(names):
                break
            await asyncio.sleep(pause)
        else:
            raise _taken()
        try:
            yield
        finally:
            self._release(names)

    async def _take(self, names: tuple[str, ...]) -> bool:
        if not self._held.isdisjoint(names):
            return False
        self._held.update(names)
        granted = False
        try:
            granted = self._send is None or await self._ask(self._send, names)
        finally:
            if not granted:
                self._release(names)
        return granted

    def _release(self, names: tuple[str, ...]) -> None:
        self._held.difference_update(names)
        if self._send is not None:
            self._send(ReleaseNames(names=names))

    async def _ask(self, send: Callable[[Message], None], names: tuple[str, ...]) -> bool:
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            send(ClaimNames(id=number, names=names))
            async with asyncio.timeout(CLAIM_S):
                granted: bool = await answer
                return granted
        except TimeoutError:
            log.debug("control does not say whether a name is free")
            return True
        finally:
            del self._waiting[number]

    def answered(self, message: NamesClaimed) -> None:
        """Control's word."""
        answer = self._waiting.get(message.id)
        if answer is not None and not answer.done():
            answer.set_result(message.granted)


def _taken() -> RequestError:
    return RequestError("rid: there is a request of that name already", code="duplicate_request_id", param="rid")
