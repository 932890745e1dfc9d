"""A request that also offers another protocol (`Connection: Upgrade`, as Java's client does for h2c) is one like any other here.

A server may leave such an offer alone (RFC 9110, 7.8), and then the body is the request's. The parser gives up at the end of the headers instead, and
what follows, the body, would be read as the next request: somebody else's words in this client's name. So it is parsed anew without the offer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Fields of the offer, and their names in `Connection`.
_OFFER: Final = frozenset((b"upgrade", b"http2-settings"))


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of the same request, as bytes, without its offer. `headers` as the parser gave them, their names in small letters."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name in _OFFER:
            continue
        if name == b"connection":
            kept = [token for token in (part.strip() for part in value.split(b",")) if token and token.lower() not in _OFFER]
            if not kept:
                continue
            value = b", ".join(kept)
        lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"
