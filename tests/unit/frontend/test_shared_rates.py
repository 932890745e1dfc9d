"""Limits of keys across frontends: what one of them takes is gone at the others too, whoever of them is replaced."""

from __future__ import annotations

import pytest

from llmd.config.keys import Key
from llmd.frontend.rates import RateLimited, RateLimits
from llmd.wire.messages import KeyUse

KEY = Key("user", b"", rpm=60, tpm=6000)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Frontend:
    """The limits of one frontend, and what it tells."""

    def __init__(self, clock: Clock, number: int, incarnation: int = 1) -> None:
        self.number, self.incarnation, self.told = number, incarnation, 0
        self.limits = RateLimits(clock, late=incarnation > 1, on_use=self._used)

    def _used(self) -> None:
        self.told += 1

    def tell(self, *others: Frontend) -> None:
        report = self.limits.report()
        for other in others if report else ():
            other.limits.hear(KeyUse(frontend=self.number, incarnation=self.incarnation, keys=report))

    def most(self, key: Key = KEY) -> int:
        """How many requests it still admits, all of them taken."""
        for count in range(10_000):
            try:
                self.limits.admit(key)
            except RateLimited:
                return count
        raise AssertionError("no limit")


def test_what_one_frontend_admits_is_gone_at_the_other() -> None:
    clock = Clock()
    a, b = Frontend(clock, 0), Frontend(clock, 1)
    for _ in range(20):
        a.limits.admit(KEY)
    a.tell(b)
    a.tell(b)  # the same again changes nothing
    for _ in range(10):
        b.limits.admit(KEY)
    b.tell(a)
    assert a.told == 20 and b.told == 10
    assert a.most() == 30
    a.tell(b)
    assert b.most() == 0


def test_both_together_keep_the_average_though_each_admits_a_burst_before_it_hears_of_the_other() -> None:
    clock = Clock()
    a, b = Frontend(clock, 0), Frontend(clock, 1)
    admitted = a.most() + b.most()
    assert admitted == 120
    a.tell(b)
    b.tell(a)
    with pytest.raises(RateLimited) as caught:
        a.limits.admit(KEY)
    assert caught.value.retry_after == 61, "60 are owed"
    for _ in range(240):  # four minutes, in steps of a second
        clock.now += 1.0
        for one, other in ((a, b), (b, a)):
            admitted += one.most()
            one.tell(other)
    assert admitted <= 60 + 240 + 2


def test_tokens_are_shared_as_well() -> None:
    clock = Clock()
    a, b = Frontend(clock, 0), Frontend(clock, 1)
    a.limits.charge(KEY, 6000)
    a.tell(b)
    with pytest.raises(RateLimited, match="tokens"):
        b.limits.admit(KEY)
    clock.now += 1.0
    b.limits.admit(KEY)


def test_a_replaced_frontend_takes_over_what_the_others_know_and_its_own_count_starts_anew() -> None:
    clock = Clock()
    a, b = Frontend(clock, 0), Frontend(clock, 1)
    for _ in range(50):
        a.limits.admit(KEY)
    a.tell(b)
    fresh = Frontend(clock, 0, incarnation=2)
    b.tell(fresh)  # nothing: b has used nothing itself
    b.limits.admit(KEY)
    b.tell(fresh)
    fresh.limits.admit(KEY)
    fresh.tell(b)
    assert b.limits.report()["user"].requests_left == pytest.approx(8)
    a.tell(b)  # a late word of the dead one
    assert b.limits.report()["user"].requests_left == pytest.approx(8)
    assert fresh.most() == 8


def test_a_replaced_frontend_does_not_pay_for_what_was_used_long_ago() -> None:
    clock = Clock()
    a, other = Frontend(clock, 0), Key("other", b"", rpm=600)
    for _ in range(500):
        a.limits.admit(other)
    clock.now += 60.0
    a.limits.admit(KEY)
    fresh = Frontend(clock, 1, incarnation=2)
    a.tell(fresh)
    a.limits.admit(other)
    a.tell(fresh)
    assert fresh.most(other) == 599


def test_what_is_full_is_not_told() -> None:
    clock = Clock()
    a = Frontend(clock, 0)
    a.limits.admit(KEY)
    a.limits.admit(Key("free", b""))
    assert list(a.limits.report()) == ["user"]
    clock.now += 1.0
    assert a.limits.report() == {}


def test_a_long_request_pays_for_all_its_tokens() -> None:
    clock = Clock()
    a = Frontend(clock, 0)
    a.limits.admit(KEY)
    clock.now += 60.0
    a.limits.charge(KEY, 6001)
    with pytest.raises(RateLimited):
        a.limits.admit(KEY)
