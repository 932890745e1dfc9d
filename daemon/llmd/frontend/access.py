"""Who may use what: `Access` is a path's class, `KeyRing` the keys of the configured files, `Guard` decides for each request.

It fails closed: a path that no route has declared open needs a key wherever keys are configured, however it is spelled.
"""

from __future__ import annotations

import enum
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

from llmd.config.keys import Key, digest_of, read_admin_key, read_keys
from llmd.config.server_args import ServerArgs
from llmd.errors import ConfigError, RequestError
from llmd.frontend.exchange import Scope
from llmd.frontend.origins import Origins
from llmd.frontend.rates import RateLimits

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds after which a changed file is noticed at the latest, by the next request.
LOOK_EVERY: Final = 1.0
#: Paths whose requests are charged tokens, and so wait while a key owes some.
_TAKE_TOKENS: Final = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate"))
#: Whoever has the admin key.
ADMIN: Final = "admin"


class Access(enum.Enum):
    """What a path asks for."""

    OPEN = "nothing: health paths"
    METRICS = "a key, if observability.metrics.require_key"
    KEY = "a key, if there is a file of keys"
    ADMIN = "the admin key, or a key that says admin"


class WatchedFile(Generic[T]):
    """What `read` makes of a file, made again when the file has changed. One that cannot be used any more leaves the last one in place."""

    def __init__(self, path: str | None, read: Callable[[str], T], empty: T, clock: Callable[[], float]) -> None:
        self._path = path
        self._read = read
        self._value = empty
        self._clock = clock
        self._next_look = float("-inf")
        self._seen: tuple[int, ...] | None = None

    @property
    def configured(self) -> bool:
        return self._path is not None

    def value(self) -> T:
        """Looks at the file once a second at most."""
        now = self._clock()
        if self._path is not None and now >= self._next_look:
            self._next_look = now + LOOK_EVERY
            self._look(self._path)
        return self._value

    def _look(self, path: str) -> None:
        try:
            found = os.stat(path)
            signature: tuple[int, ...] = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
        except OSError:
            signature = ()
        if signature == self._seen:
            return
        first, self._seen = self._seen is None, signature
        try:
            self._value = self._read(path)
        except ConfigError as error:
            log.error("keys cannot be read, %s: %s", "so nobody gets in" if first else "the ones read before stay in force", "; ".join(error.faults))
        else:
            if not first:
                log.info("%s has changed and was read again", path)


class KeyRing:
    """The keys in force. `clock`: monotonic seconds."""

    def __init__(self, keys_file: str | None, admin_file: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys: WatchedFile[Mapping[bytes, Key]] = WatchedFile(keys_file, lambda path: {key.digest: key for key in read_keys(path)}, {}, clock)
        self._admin: WatchedFile[bytes] = WatchedFile(admin_file, read_admin_key, b"", clock)

    @property
    def asked_for(self) -> bool:
        """Whether there is a file of keys, so that nobody comes in without one."""
        return self._keys.configured

    def find(self, presented: bytes) -> Key | None:
        """The key that was presented. Only digests are compared, and those in constant time: how long it takes tells nothing of a key."""
        digest = digest_of(presented)
        admin = self._admin.value()
        if hmac.compare_digest(digest, admin):
            return Key(ADMIN, admin, admin=True)
        key = self._keys.value().get(digest)
        return key if key is not None and hmac.compare_digest(digest, key.digest) else None

    @property
    def has_admin(self) -> bool:
        """Whether anybody could do what an admin may."""
        return bool(self._admin.value()) or any(key.admin for key in self._keys.value().values())


class Guard:
    """`paths`: the class of each path that has one of its own; all others need a key."""

    def __init__(self, args: ServerArgs, paths: Mapping[str, Access], ring: KeyRing, limits: RateLimits) -> None:
        self._paths = paths
        self._metrics_open = not args.observability.metrics.require_key
        self._ring = ring
        self._limits = limits
        self._origins = Origins(args.http.host)

    def configure(self, args: ServerArgs, ring: KeyRing) -> None:
        """Go by other values from the next request on."""
        self._metrics_open, self._ring = not args.observability.metrics.require_key, ring

    def admit(self, scope: Scope) -> Key | None:
        """Whose request this is, None where nobody has to say. Raises RequestError 401, 403, 429."""
        access = self._paths.get(scope["path"], Access.KEY)
        if access is Access.OPEN or (access is Access.METRICS and self._metrics_open):
            return None
        presented = _presented(scope)
        key = self._ring.find(presented) if presented else None
        if access is Access.ADMIN:
            return self._admin(key)
        if not self._ring.asked_for:
            self._origins.admit(scope)
        elif key is None:
            raise Unauthorized("give an API key of this server: Authorization: Bearer KEY" if not presented else "this API key is not known here")
        if key is not None and scope["method"] == "POST":
            self._limits.admit(key, takes_tokens=scope["path"] in _TAKE_TOKENS)
        return key

    def charge(self, key: Key | None, tokens: int) -> None:
        """A request of `key` is over and has taken so many tokens."""
        if key is not None:
            self._limits.charge(key, tokens)

    def _admin(self, key: Key | None) -> Key:
        if key is not None and key.admin:
            return key
        if key is not None:
            raise RequestError("this key is for requests; the administrative paths need the admin key", code="forbidden")
        if not self._ring.has_admin:
            raise RequestError("the administrative paths need an admin key, and this server has none: set http.admin_key_file", code="forbidden")
        raise Unauthorized("the administrative paths need the admin key: Authorization: Bearer KEY")


class Unauthorized(RequestError):
    """401; the answer names the scheme (RFC 9110, 11.6.1)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


def _presented(scope: Scope) -> bytes:
    """The key of the Authorization header, empty where there is none in the scheme Bearer."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""
