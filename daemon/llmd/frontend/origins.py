"""Pages of other sites, which a browser on this machine has open, may not use a server that asks for no key.

A browser lets any page send a simple POST to any address, also to one that only this machine reaches, and with a name of its own that it has
resolve to this machine (DNS rebinding) a page even reads the answer. The browser says where such a request comes from, and what name was used.
Where a key is asked for none of this is needed: no page has one. Programs that are no browsers send none of these headers.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from llmd.config.listen import bare_host, is_loopback
from llmd.errors import RequestError
from llmd.frontend.exchange import Scope

_LOCAL: Final = "localhost"


class Origins:
    """`host`: `http.host`, where the server is bound."""

    def __init__(self, host: str) -> None:
        self._host = bare_host(host).lower()
        self._local = is_loopback(host)

    def admit(self, scope: Scope) -> None:
        """Raises RequestError 403 for a request that a page of another site makes."""
        headers = {bytes(name): bytes(value).decode("latin-1").strip().lower() for name, value in scope["headers"]}
        if headers.get(b"sec-fetch-site") == "cross-site":
            raise _forbidden("a page of another site may not use this server without a key: set http.api_keys_file")
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2] not in {name for name in (host, headers.get(b"x-forwarded-host", "")) if name}:
            raise _forbidden("a page of another origin may not use this server without a key: set http.api_keys_file")
        if self._local and host and not self._known(_name_of(host)):
            raise _forbidden("this server is for this machine: call it by an address or as localhost, or set http.api_keys_file")

    def _known(self, name: str) -> bool:
        return name == self._host or name == _LOCAL or name.endswith("." + _LOCAL) or _is_address(name)


def _forbidden(message: str) -> RequestError:
    return RequestError(message, code="forbidden")


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
