"""`RateLimits`: requests and tokens a minute for each key. Pure: time comes from the clock that is handed in.

A bucket holds a minute's worth and fills evenly. A request is taken from it at once; its tokens, which nobody knows before, when it
is over, so that the bucket may owe: then the key waits until it is filled again. Each frontend counts what it serves itself; what
several of them count together would go through the same two calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmd.config.keys import Key
from llmd.errors import RequestError


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
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return max(0.0, (1 - self._level) * 60 / self.per_minute)

    def take(self, count: int) -> None:
        """Take so many, whether they are there or not."""
        self._level -= count


class RateLimits:
    """The buckets of all keys, by name. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def admit(self, key: Key) -> None:
        """Count one request. Raises RateLimited, and counts nothing then."""
        now = self._clock()
        requests, tokens = _bucket(self._requests, key.name, key.rpm, now), _bucket(self._tokens, key.name, key.tpm, now)
        if requests is not None and (seconds := requests.wait(now)) > 0:
            raise RateLimited(f"the API key {key.name!r} may make {key.rpm} requests a minute", seconds)
        if tokens is not None and (seconds := tokens.wait(now)) > 0:
            raise RateLimited(f"the API key {key.name!r} may use {key.tpm} tokens a minute", seconds)
        if requests is not None:
            requests.take(1)

    def charge(self, key: Key, tokens: int) -> None:
        """A request has taken so many tokens."""
        bucket = _bucket(self._tokens, key.name, key.tpm, self._clock())
        if bucket is not None:
            bucket.take(tokens)


def _bucket(buckets: dict[str, Bucket], name: str, per_minute: int | None, now: float) -> Bucket | None:
    """The bucket of a limit; a new one where the limit has changed. Only names of the file get one, so there are as many as keys."""
    if per_minute is None:
        return None
    bucket = buckets.get(name)
    if bucket is None or bucket.per_minute != per_minute:
        bucket = buckets[name] = Bucket(per_minute, now)
    return bucket
