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
        if len(set(names)) < len(names) or not self._held.isdisjoint(names):
            raise _taken()
        self._held.update(names)
        try:
            if names and self._send is not None and not await self._ask(self._send, names):
                raise _taken()
            yield
        finally:
            self._held.difference_update(names)
            if names and self._send is not None:
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
