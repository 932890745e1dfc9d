"""`Maker`: big answers are made in a thread, one after another, so that the event loop goes on turning and only one of them is in memory as objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

#: Logprobs, alternatives included, or numbers of vectors up to which an answer, or a piece of one, is made in the event loop: a few milliseconds.
INLINE_WEIGHT: Final = 4096


class Maker:
    """Of one frontend."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")

    async def make(self, weight: int, call: Callable[[], bytes]) -> bytes:
        """What `call` gives, made here or in the thread. What it uses must stand still meanwhile."""
        if weight <= INLINE_WEIGHT:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """What has not begun is not made any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
