"""Binding, and taking over what systemd passed."""

from __future__ import annotations

import os
import socket

import pytest

from llmd.errors import ResourceError
from llmd.supervisor import sockets


def test_port_0_takes_a_free_one_and_the_url_tells_it() -> None:
    listener = sockets.listen("127.0.0.1", 0, 16, {})
    with listener.socket:
        assert listener.port > 0
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        assert not listener.activated
        assert not listener.socket.get_inheritable()
        with socket.create_connection((listener.host, listener.port)):
            pass


def test_a_busy_port_is_named_with_its_host() -> None:
    with sockets.bind("127.0.0.1", 0, 16) as first:
        port = first.getsockname()[1]
        with pytest.raises(ResourceError) as caught:
            sockets.bind("127.0.0.1", port, 16)
    assert f"127.0.0.1:{port}" in caught.value.message
    assert "http.port" in caught.value.hint


@pytest.mark.parametrize("host", ["256.1.1.1", "no-such-host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ResourceError, match=host.replace(".", r"\.")):
        sockets.bind(host, 0, 16)


def test_ipv6() -> None:
    try:
        listener = sockets.listen("::1", 0, 16, {})
    except ResourceError:
        pytest.skip("no IPv6 loopback")
    with listener.socket:
        assert listener.url == f"http://[::1]:{listener.port}"


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("10.0.0.1", "http://10.0.0.1:80"), ("box", "http://box:80")]
)
def test_urls(host: str, url: str) -> None:
    assert sockets.url_of(host, 80) == url


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1", "LISTEN_PID": "1"},
        {"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid())},
        {"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())},
    ],
)
def test_sockets_meant_for_another_are_not_taken(variables: dict[str, str]) -> None:
    environ = {**variables, "LISTEN_FDNAMES": "http", "OTHER": "kept"}
    listener = sockets.listen("127.0.0.1", 0, 16, environ)
    listener.socket.close()
    assert not listener.activated
    assert environ == {"OTHER": "kept"}
