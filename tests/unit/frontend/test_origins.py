"""Pages of other sites and of names that merely lead here are refused where no key is asked for; programs and proxies are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llmd.config import ServerArgs
from llmd.config.server_args import HttpArgs
from llmd.errors import RequestError
from llmd.frontend.access import Access, Guard, KeyRing
from llmd.frontend.rates import RateLimits


def guard(http: HttpArgs) -> Guard:
    return Guard(ServerArgs(http=http), {"/livez": Access.OPEN}, KeyRing(http.api_keys_file, None), RateLimits(lambda: 0.0))


def answer(which: Guard, path: str = "/v1/completions", **headers: str) -> tuple[int, str | None] | None:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        which.admit({"path": path, "method": "POST", "headers": given})
    except RequestError as error:
        return error.status, error.code
    return None


def refused(which: Guard, path: str = "/v1/completions", **headers: str) -> bool:
    found = answer(which, path, **headers)
    return found == (403, "forbidden") if found is not None else False


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "app.localhost", "[::1]:8000", "127.0.0.1", "192.168.1.7:80", ""])
def test_programs_and_own_pages_come_in(host: str) -> None:
    local = guard(HttpArgs())
    assert not refused(local, host=host)
    assert not refused(local, host=host, sec_fetch_site="same-origin", **({"origin": f"http://{host}"} if host else {}))
    assert not refused(local, host=host, sec_fetch_site="none")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:8000", "notlocalhost"])
def test_a_name_that_leads_here_is_refused_on_loopback(host: str) -> None:
    assert refused(guard(HttpArgs()), host=host)
    assert refused(guard(HttpArgs(host="::1")), host=host)
    assert not refused(guard(HttpArgs(host="0.0.0.0", allow_unauthenticated=True)), host=host)
    assert not refused(guard(HttpArgs()), "/livez", host=host)


def test_pages_of_other_sites_are_refused() -> None:
    for which in (guard(HttpArgs()), guard(HttpArgs(host="0.0.0.0", allow_unauthenticated=True))):
        assert refused(which, host="127.0.0.1:8000", sec_fetch_site="cross-site")
        for origin in ("http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8001", "", "chrome-extension://abc"):
            assert refused(which, host="127.0.0.1:8000", origin=origin), origin
        assert not refused(which, host="127.0.0.1:8000", origin="https://chat.example", x_forwarded_host="chat.example")


def test_where_a_key_is_asked_for_the_key_decides(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:sk-somebody-123\n")
    keys.chmod(0o600)
    behind = guard(replace(HttpArgs(), api_keys_file=str(keys)))
    page = {"host": "llm.example", "origin": "https://chat.example", "sec_fetch_site": "cross-site"}
    assert answer(behind, authorization="Bearer sk-somebody-123", **page) is None
    assert answer(behind, **page) == (401, "invalid_api_key")
