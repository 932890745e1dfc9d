"""`Sharing`: what several frontends have in common: the use of API keys, and the names that clients give their requests.

Of keys control passes on what each frontend says, and keeps nothing. Of names it is the judge: one is held by one frontend until
that releases it or ends. A replaced control hears all names again with the frontends' Hello, and judges when it has heard all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from llmd.control.channel import Channel
from llmd.control.table import Worker, WorkerTable
from llmd.wire.messages import ClaimNames, KeyUse, KeyUses, NamesClaimed, ReleaseNames

#: Seconds in which the use of keys is gathered, so that many frontends do not cost a message for each pair of them.
GATHER_S: Final = 0.05


class Sharing:
    """Lives in control's event loop. `settled`: whether every frontend there is has introduced itself."""

    def __init__(self, table: WorkerTable, channel: Channel, settled: Callable[[], bool]) -> None:
        self._settled = settled
        self._early: list[tuple[Worker, ClaimNames | ReleaseNames]] = []
        """What waits until then, in the order it came."""
        self._table = table
        self._channel = channel
        self._uses: dict[int, KeyUse] = {}
        """Frontend -> its newest word that has not been passed on."""
        self._holders: dict[str, tuple[int, int]] = {}
        """Name -> (frontend, incarnation)."""

    def take(self, worker: Worker, message: KeyUse | ClaimNames | ReleaseNames) -> None:
        """A frontend's word."""
        match message:
            case KeyUse():
                if not self._uses:
                    asyncio.get_running_loop().call_later(GATHER_S, self._pass_on)
                self._uses[worker.rank] = message
            case ClaimNames(id=0):
                self._claim(_holder(worker), message.names)
            case _ if self._early or not self._settled():
                self._early.append((worker, message))
            case _:
                self._judge(worker, message)

    def turned(self) -> None:
        """To be called now and then."""
        if self._early and self._settled():
            early, self._early = self._early, []
            for worker, message in early:
                if self._table.get(worker.name) is worker:
                    self._judge(worker, message)

    def _judge(self, worker: Worker, message: ClaimNames | ReleaseNames) -> None:
        match message:
            case ClaimNames():
                granted = self._claim(_holder(worker), message.names)
                self._channel.publish(NamesClaimed(id=message.id, granted=granted), [worker])
            case ReleaseNames():
                for name in message.names:
                    if self._holders.get(name) == _holder(worker):
                        del self._holders[name]

    def gone(self, frontend: Worker) -> None:
        """What it held is free."""
        self._holders = {name: holder for name, holder in self._holders.items() if holder != _holder(frontend)}

    def _claim(self, who: tuple[int, int], names: tuple[str, ...]) -> bool:
        if any(self._holders.get(name, who) != who for name in names):
            return False
        self._holders.update(dict.fromkeys(names, who))
        return True

    def _pass_on(self) -> None:
        uses, self._uses = list(self._uses.values()), {}
        self._channel.publish(KeyUses(uses=uses), self._table.role("frontend"))


def _holder(worker: Worker) -> tuple[int, int]:
    return worker.rank, worker.incarnation
