"""API keys: the formats of `http.api_keys_file` and `http.admin_key_file`, and whether a file is safe enough to hold them.

One key a line, `NAME:KEY` or `NAME:sha256:HEX`, then `rpm=N`, `tpm=N` and `admin` as wanted; a line that begins with `#` is a comment. The admin key's file
holds one line, `KEY` or `sha256:HEX`. Only digests are kept in memory, and no message ever repeats what stands in a file.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import Struct

from llmd.errors import ConfigError, UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A key that is written out and shorter than this can be guessed, which is worth a warning. A digest does not say how long its key is.
ADVISED_LENGTH: Final = 16
MAX_BYTES: Final = 2**20
MAX_KEY: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_LIMIT: Final = re.compile(r"(rpm|tpm)=([0-9]{1,12})")
#: Nobody but the owner may write, nobody but owner and group may read.
_ALLOWED_MODE: Final = 0o640


class Key(Struct, frozen=True):
    """One key, known by its digest."""

    name: str
    digest: bytes
    """sha256 of the key."""
    rpm: int | None = None
    """Requests a minute."""
    tpm: int | None = None
    """Tokens a minute, of prompts and outputs."""
    admin: bool = False


def read_keys(path: str) -> tuple[Key, ...]:
    """The keys of `http.api_keys_file`, at least one. Raises ConfigError with every fault."""
    return _read(path, parse_keys)


def read_admin_key(path: str) -> bytes:
    """The digest of the one key in `http.admin_key_file`. Raises ConfigError."""
    return _read(path, parse_admin_key)


def key_faults(path: str | None, read: Callable[[str], object]) -> list[str]:
    """Why a file that is configured cannot be used."""
    if path is None:
        return []
    try:
        read(path)
    except ConfigError as error:
        return error.faults
    return []


def keep_key(spelling: str, secret: str, *, name: str) -> str:
    """The path of a new private file with this one key's digest (of `http.admin_key_file`'s form where `name` is empty).

    For faces where a key is an argument. The file goes when this process ends. Raises UsageError, whose message begins with `spelling`.
    """
    try:
        digest = _digest(secret).hex()
    except ValueError as error:
        raise UsageError(f"{spelling}: {error}") from None
    try:
        handle, path = tempfile.mkstemp(prefix="llmd-key-")
        with os.fdopen(handle, "w") as file:
            file.write(f"{name}:sha256:{digest}\n" if name else f"sha256:{digest}\n")
    except OSError as error:
        raise UsageError(f"{spelling}: no place for its digest: {error.strerror}") from None
    atexit.register(_forget, path, os.getpid())
    return path


def _forget(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(path)


def parse_keys(text: str) -> tuple[Key, ...]:
    """Raises ConfigError; each fault begins with `line N`."""
    keys: dict[str, Key] = {}
    faults: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _key(words)
            if key.name in keys:
                raise ValueError(f"the name {key.name} is there already")
            if any(key.digest == other.digest for other in keys.values()):
                raise ValueError("another line has the same key")
            keys[key.name] = key
            _warn_if_short(words[0].partition(":")[2], f"the API key {key.name}")
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    if not keys and not faults:
        faults.append("it holds no key")
    if faults:
        raise ConfigError(faults)
    return tuple(keys.values())


def parse_admin_key(text: str) -> bytes:
    """Raises ConfigError."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        if len(lines) != 1:
            raise ValueError(f"expected one line with the key, found {len(lines)}")
        digest = _digest(lines[0])
        _warn_if_short(lines[0], "the admin key")
        return digest
    except ValueError as error:
        raise ConfigError(str(error)) from None


def digest_of(key: str | bytes) -> bytes:
    """What is kept and compared in place of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _key(words: list[str]) -> Key:
    name, colon, secret = words[0].partition(":")
    if not colon:
        raise ValueError("expected NAME:KEY or NAME:sha256:HEX")
    if not _NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 of letters, digits and _ . @ -")
    limits: dict[str, int] = {}
    admin = False
    for position, word in enumerate(words[1:], 2):
        found = _LIMIT.fullmatch(word)
        if found and int(found[2]) > 0:
            limits[found[1]] = int(found[2])
        elif word == "admin":
            admin = True
        else:
            raise ValueError(f"word {position} is none of rpm=N, tpm=N and admin")
    return Key(name, _digest(secret), limits.get("rpm"), limits.get("tpm"), admin)


def _warn_if_short(secret: str, whose: str) -> None:
    if len(secret) < ADVISED_LENGTH:
        log.warning("%s has fewer than %d characters, so it can be guessed: take a longer one, like `openssl rand -hex 24` makes", whose, ADVISED_LENGTH)


def _digest(secret: str) -> bytes:
    if secret.startswith("sha256:"):
        if not _DIGEST.fullmatch(secret[7:]):
            raise ValueError("sha256: must be followed by 64 hexadecimal digits")
        return bytes.fromhex(secret[7:])
    if not secret or len(secret) > MAX_KEY or not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ValueError(f"a key has 1 to {MAX_KEY} printable ASCII characters, no blanks")
    return digest_of(secret)


def _read(path: str, parse: Callable[[str], T]) -> T:
    """Open once and look at what was opened, so that nobody exchanges the file between check and use."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        _check_safe(os.fstat(handle))
        return parse(os.read(handle, MAX_BYTES).decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None
    except ConfigError as error:
        raise ConfigError([f"{path}: {fault}" for fault in error.faults]) from None
    finally:
        os.close(handle)


def _check_safe(found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("not a file")
    if mode & ~_ALLOWED_MODE:
        raise ConfigError(f"its mode is {mode:04o}, but it holds keys: set it to 0600 or 0640")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"it belongs to uid {found.st_uid}, who could change the keys: chown it to root or to uid {os.geteuid()}")
