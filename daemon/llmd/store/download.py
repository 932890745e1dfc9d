"""One file over HTTP, resumed where an earlier try ended, verified before anybody sees it under its name.

Proxies come from the environment (HTTPS_PROXY and so on), certificates from SSL_CERT_FILE, REQUESTS_CA_BUNDLE or PIP_CERT, else the system's.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from llmd.errors import ResourceError

#: (bytes so far, bytes in all)
Progress = Callable[[int, int], None]

CHUNK: Final = 256 * 1024
#: Seconds without a byte.
STALL_S: Final = 60.0
#: How often a connection that broke is taken up again without having brought anything.
TRIES: Final = 5
_CERTIFICATES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT")


class Refused(ResourceError):
    """The server answers, but not with the file."""


def fetch(url: str, target: Path, sha256: str, progress: Progress, environ: Mapping[str, str] = os.environ) -> None:
    """Bring `url` to `target`, which exists only whole. What has come so far lies beside it as NAME.part. Raises ResourceError, OSError."""
    part = target.with_name(f"{target.name}.part")
    idle = 0
    while True:
        before = _size(part)
        try:
            if _take(url, part, progress, environ):
                break
            fault = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise Refused(f"cannot download {url}: HTTP {error.code}") from None
            fault = f"HTTP {error.code}"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            fault = str(getattr(error, "reason", None) or error or type(error).__name__)
        idle = 0 if _size(part) > before else idle + 1
        if idle == TRIES:
            raise ResourceError(f"cannot download {url}: {fault}", hint="what has come so far is kept; the next try goes on from there")
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        part.unlink()
        raise ResourceError(f"cannot use {url}: its sha256 is {found}, not {sha256}")
    os.replace(part, target)


def _take(url: str, part: Path, progress: Progress, environ: Mapping[str, str]) -> bool:
    """One connection. True when the file is complete."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=STALL_S, context=_context(url, environ))
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send
            error.close()
            return True
        raise
    with answer, part.open("ab" if answer.status == 206 else "wb") as file:
        done = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length and length.isdecimal() else 0
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return done >= total


def _context(url: str, environ: Mapping[str, str]) -> ssl.SSLContext | None:
    if not url.startswith("https:"):
        return None
    bundle = next((environ[name] for name in _CERTIFICATES if environ.get(name)), None)
    return ssl.create_default_context(cafile=bundle)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
