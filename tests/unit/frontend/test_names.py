"""Names of requests: one runs once, whichever frontend it comes to; control is asked, and not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llmd.errors import RequestError
from llmd.frontend import names as module
from llmd.frontend.names import Names
from llmd.wire.messages import ClaimNames, Message, NamesClaimed, ReleaseNames


async def refused(names: Names, *wanted: str) -> bool:
    try:
        async with names.held(wanted):
            return False
    except RequestError as error:
        return (error.status, error.code, error.param) == (409, "duplicate_request_id", "rid")


async def test_alone_a_frontend_knows_what_it_runs() -> None:
    names = Names()
    async with names.held(("a", "b")):
        assert await refused(names, "b") and await refused(names, "c", "c") and not await refused(names, "c")
        assert names.introduction() == []
    assert not await refused(names, "a")


def judge(names: Names, sent: list[Message], verdict: Callable[[ClaimNames], bool]) -> Callable[[Message], None]:
    def send(message: Message) -> None:
        sent.append(message)
        if isinstance(message, ClaimNames):
            asyncio.get_running_loop().call_soon(names.answered, NamesClaimed(id=message.id, granted=verdict(message)))

    return send


async def test_with_others_control_judges() -> None:
    names, sent = Names(), list[Message]()
    names.share(judge(names, sent, lambda claim: "theirs" not in claim.names))
    assert await refused(names, "theirs")
    sent.clear()
    async with names.held(("mine",)):
        assert await refused(names, "mine"), "nobody has to be asked"
        assert names.introduction() == [ClaimNames(id=0, names=("mine",))]
    claim, release = sent
    assert isinstance(claim, ClaimNames) and claim.names == ("mine",) and release == ReleaseNames(names=("mine",))


async def test_a_name_that_is_released_a_moment_later_is_not_refused() -> None:
    names, sent = Names(), list[Message]()
    names.share(judge(names, sent, lambda claim: len(sent) > 1))
    assert not await refused(names, "a")


async def test_nobody_waits_for_a_control_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM_S", 0.01)
    names, sent = Names(), list[Message]()
    names.share(sent.append)
    assert not await refused(names, "a")
    names.answered(NamesClaimed(id=1, granted=False))  # too late
    assert len(sent) == 2
