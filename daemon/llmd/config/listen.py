"""`host:port` of the configuration, and what a host means."""

from __future__ import annotations

import ipaddress
import re

_LISTEN = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):(?P<port>\d{1,5})")


def host_and_port(listen: str) -> tuple[str, int]:
    """`127.0.0.1:9100`, `[::1]:9100`, `localhost:9100`. Raises ValueError with what was expected."""
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"expected HOST:PORT, like 127.0.0.1:8001 or [::1]:8001, got {listen!r}")
    return match["host"].strip("[]"), int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine reaches `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return False


def bare_host(host: str) -> str:
    """An IPv6 address as the system takes it, without the brackets of a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
