"""`RateLimits`: requests and tokens a minute for each key. Pure: time comes from the clock that is handed in.

A bucket holds a minute's worth and fills evenly. A request is taken from it at once; its tokens, which nobody knows before, when it
is over, so that the bucket may owe: then the key waits until it is filled again.

Several frontends tell each other, through control, what each of them has taken since its start (`report`, `hear`), and take that from
their own buckets too. What is under way is not known yet: together they may admit as much as each of them still has, once; then the
buckets owe it. So bursts may be exceeded, averages not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmd.config.keys import Key
from llmd.errors import RequestError
from llmd.wire.messages import KeyCount, KeyUse


class RateLimited(RequestError):
    """429 with the seconds after which it is worth trying again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self._seconds = max(1, math.ceil(seconds))

    @property
    def retry_after(self) -> int:
        return self._seconds


class Bucket:
    """Full at first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until there is at least one; 0: now."""
        return max(0.0, (1 - self.left(now)) * 60 / self.per_minute)

    def left(self, now: float) -> float:
        """What it holds; below 0 is owed."""
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, count: int, now: float) -> None:
        """Take so many, whether they are there or not."""
        self._level = self.left(now) - count

    def lower(self, level: float, now: float) -> None:
        """It holds no more than that."""
        self._level = min(self.left(now), level)


class RateLimits:
    """The buckets of all keys, by name. `clock`: monotonic seconds. `on_use` is called when there is something to report.

    `late`: other frontends may have served before this one began, so that it takes over what their buckets hold."""

    def __init__(self, clock: Callable[[], float], *, late: bool = False, on_use: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._late = late
        self._on_use = on_use
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._used: dict[str, tuple[int, int]] = {}
        """Requests and tokens of each key with limits, here and since the start."""
        self._heard: dict[int, KeyUse] = {}
        """Frontend -> its last word."""
        self._older: set[int] = set()
        """Frontends that may have served before this one: a key's first count from one of them is not for this one to take off."""

    def admit(self, key: Key, *, takes_tokens: bool = True) -> None:
        """Count one request. Raises RateLimited, and counts nothing then. One that takes no tokens need not wait for any."""
        now = self._clock()
        requests, tokens = _bucket(self._requests, key.name, key.rpm, now), _bucket(self._tokens, key.name, key.tpm, now)
        if requests is not None and (seconds := requests.wait(now)) > 0:
            raise RateLimited(f"the API key {key.name!r} may make {key.rpm} requests a minute", seconds)
        if takes_tokens and tokens is not None and (seconds := tokens.wait(now)) > 0:
            raise RateLimited(f"the API key {key.name!r} may use {key.tpm} tokens a minute", seconds)
        if requests is not None:
            requests.take(1, now)
            self._count(key.name, 1, 0)

    def charge(self, key: Key, tokens: int) -> None:
        """A request has taken so many tokens."""
        now = self._clock()
        bucket = _bucket(self._tokens, key.name, key.tpm, now)
        if bucket is not None and tokens:
            bucket.take(tokens, now)
            self._count(key.name, 0, tokens)

    def _count(self, name: str, requests: int, tokens: int) -> None:
        before = self._used.get(name, (0, 0))
        self._used[name] = before[0] + requests, before[1] + tokens
        self._on_use()

    # ------------------------------------------------------------ other frontends

    def report(self) -> dict[str, KeyCount]:
        """What has been used here, of each key whose buckets are not full; empty: nothing is worth telling."""
        now, found = self._clock(), {}
        for name, (requests, tokens) in self._used.items():
            rpm, requests_left = _state(self._requests.get(name), now)
            tpm, tokens_left = _state(self._tokens.get(name), now)
            if requests_left < (rpm or 0) or tokens_left < (tpm or 0):
                found[name] = KeyCount(requests, tokens, rpm, tpm, requests_left, tokens_left)
        return found

    def hear(self, use: KeyUse) -> None:
        """What another frontend reports: what it has used since its last report is taken from the buckets here."""
        before = self._heard.get(use.frontend)
        if before is not None and before.incarnation > use.incarnation:
            return
        if before is None and self._late:
            self._older.add(use.frontend)
        elif before is not None and before.incarnation < use.incarnation:
            self._older.discard(use.frontend)
            before = None
        known = before.keys if before is not None else {}
        for name, count in use.keys.items():
            self._take_off(name, count, known.get(name), joins=name not in known and use.frontend in self._older)
        self._heard[use.frontend] = KeyUse(frontend=use.frontend, incarnation=use.incarnation, keys={**known, **use.keys})

    def _take_off(self, name: str, count: KeyCount, known: KeyCount | None, *, joins: bool) -> None:
        now = self._clock()
        pairs = (
            (self._requests, count.rpm, count.requests - (known.requests if known else 0), count.requests_left),
            (self._tokens, count.tpm, count.tokens - (known.tokens if known else 0), count.tokens_left),
        )
        for buckets, per_minute, used, left in pairs:
            if per_minute is None:
                continue
            bucket = buckets.setdefault(name, Bucket(per_minute, now))
            if joins:
                bucket.lower(left, now)
            elif used > 0:
                bucket.take(used, now)


def _state(bucket: Bucket | None, now: float) -> tuple[int | None, float]:
    return (None, 0.0) if bucket is None else (bucket.per_minute, bucket.left(now))


def _bucket(buckets: dict[str, Bucket], name: str, per_minute: int | None, now: float) -> Bucket | None:
    """The bucket of a limit; a new one where the limit has changed. Only names of the file get one, so there are as many as keys."""
    if per_minute is None:
        return None
    bucket = buckets.get(name)
    if bucket is None or bucket.per_minute != per_minute:
        bucket = buckets[name] = Bucket(per_minute, now)
    return bucket
