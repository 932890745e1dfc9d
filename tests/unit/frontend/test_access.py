"""Who gets in: every route of the application without a key, with each kind of key, and oddly spelled; key files that change; rates."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.routing import Route

from llmd.config import ServerArgs
from llmd.config.keys import Key, digest_of, parse_admin_key, parse_keys
from llmd.config.server_args import HttpArgs, MetricsArgs, ObservabilityArgs
from llmd.errors import RequestError
from llmd.frontend import app as app_module
from llmd.frontend.access import LOOK_EVERY, Access, Guard, KeyRing
from llmd.frontend.access_log import AccessLog
from llmd.frontend.app import access_of, create_app
from llmd.frontend.engine_view import EngineView
from llmd.frontend.rates import Bucket, RateLimited, RateLimits
from llmd.frontend.runtime import Runtime
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter
from tests.daemon import SLOW

from .test_app import NoPort, nothing, served
from .test_state import BOOT

USER, ROOT, OWNER = "sk-user-7c1", "sk-root-55b", "sk-owner-09e"
#: All that answers without a key; a new path here is a decision.
OPEN = {"/livez", "/ping", "/readyz", "/health", "/startupz", "/health_generate"}


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def key_files(tmp_path: Path) -> HttpArgs:
    keys = write(tmp_path / "keys", f"user:{USER}\nroot:{ROOT} admin\n")
    owner = write(tmp_path / "admin", f"{OWNER}\n")
    return HttpArgs(api_keys_file=str(keys), admin_key_file=str(owner))


def make_runtime(tmp_path: Path, http: HttpArgs, *, require_key: bool = False) -> Runtime:
    args = ServerArgs(http=http, observability=ObservabilityArgs(metrics=MetricsArgs(require_key=require_key)))
    boot = replace(BOOT, args=args)
    view, meter = EngineView(boot, restarted=False), Meter()
    manager = TokenizerManager(0, view, NoPort(), meter)  # type: ignore[arg-type]
    return Runtime(boot, view, manager, meter, AccessLog(tmp_path / "access.log", role="f", exclude=(), as_json=True))


def routes(runtime: Runtime) -> list[Route]:
    return app_module._routes(runtime)


def example(path: str) -> str:
    return path.replace("{model:path}", "some/model")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20 * SLOW) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def check_401(answer: httpx.Response) -> None:
    assert answer.status_code == 401, (answer.request.url, answer.status_code)
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("authentication_error", None, "invalid_api_key")


async def test_every_route_is_closed_without_a_key_but_those_that_are_meant_to_be_open(tmp_path: Path, client: httpx.AsyncClient) -> None:
    runtime = make_runtime(tmp_path, key_files(tmp_path), require_key=True)
    walked = set()
    async with served(create_app(runtime, nothing())) as url:
        for route in routes(runtime):
            for method in sorted(route.methods or ()):
                without = await client.request(method, url + example(route.path))
                if route.path in OPEN:
                    assert without.status_code not in (401, 403), route.path
                elif method == "HEAD":
                    assert without.status_code == 401
                else:
                    check_401(without)
                    check_401(await client.request(method, url + example(route.path), headers=bearer("sk-wrong")))
                known = await client.request(method, url + example(route.path), headers=bearer(USER))
                assert known.status_code == 403 if access_of([route])[route.path] is Access.ADMIN else known.status_code not in (401, 403), route.path
                for key in (ROOT, OWNER):
                    assert (await client.request(method, url + example(route.path), headers=bearer(key))).status_code not in (401, 403), route.path
            walked.add(route.path)
    assert walked >= OPEN | {"/", "/metrics", "/v1/chat/completions", "/v1/completions", "/generate", "/v1/models", "/v1/models/{model:path}"}
    runtime.manager.executor.shutdown()


ODD = [
    "//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/v1/models%2f", "/v1/./models", "/%76%31/models", "/livez/", "//livez", "/LIVEZ", "/livez/x",
    "/livez;x=1", "/livez%00", "/no/such/path", "/docs", "/redoc", "/openapi.json", "/metrics/", "/.env", "/v1/models?key=" + USER,
]  # fmt: skip


async def test_no_odd_spelling_opens_anything(tmp_path: Path, client: httpx.AsyncClient) -> None:
    runtime = make_runtime(tmp_path, key_files(tmp_path))
    async with served(create_app(runtime, nothing())) as url:
        port = int(url.rsplit(":", 1)[1])
        for path in ODD:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT", "TRACE"):
                assert await raw_status(port, f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n") == 401, (method, path)
        for header in ("Basic c2stdXNlci03YzE=", USER, "Bearer", "Bearer  ", f"Bearer {USER} x", f"Bearer {USER}\x00", f"Token {USER}", f"Bearer {USER[:-1]}"):
            assert await raw_status(port, f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: {header}\r\n") in (400, 401), header
        assert await raw_status(port, f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nAUTHORIZATION: bEARER   {USER}\r\n") == 200
        for method in ("OPTIONS", "POST", "DELETE"):
            assert await raw_status(port, f"{method} /livez HTTP/1.1\r\nhost: localhost\r\n") == 405
    runtime.manager.executor.shutdown()


async def raw_status(port: int, head: str) -> int:
    """The status of a request that is sent as written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + "connection: close\r\n\r\n").encode("latin-1"))
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return int(line.split()[1])


async def test_metrics_are_open_unless_a_key_is_required(tmp_path: Path, client: httpx.AsyncClient) -> None:
    for require in (False, True):
        runtime = make_runtime(tmp_path, key_files(tmp_path), require_key=require)
        async with served(create_app(runtime, nothing())) as url:
            assert ((await client.get(url + "/metrics")).status_code == 401) is require
            assert (await client.get(url + "/metrics", headers=bearer(USER))).status_code == 503
        runtime.manager.executor.shutdown()


async def test_without_a_file_of_keys_any_key_or_none_will_do(tmp_path: Path, client: httpx.AsyncClient) -> None:
    runtime = make_runtime(tmp_path, HttpArgs())
    async with served(create_app(runtime, nothing())) as url:
        for headers in ({}, bearer("anything"), {"Authorization": "x"}):
            assert (await client.get(url + "/v1/models", headers=headers)).status_code == 200
    runtime.manager.executor.shutdown()


async def test_a_page_of_another_origin_is_never_let_in_by_a_browser(tmp_path: Path, client: httpx.AsyncClient) -> None:
    runtime = make_runtime(tmp_path, HttpArgs())
    async with served(create_app(runtime, nothing())) as url:
        for method in ("GET", "OPTIONS"):
            answer = await client.request(method, url + "/v1/models", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
            assert not [name for name in answer.headers if name.startswith("access-control-")]
    runtime.manager.executor.shutdown()


async def test_no_key_reaches_a_log_or_an_answer(tmp_path: Path, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    http = key_files(tmp_path)
    runtime = make_runtime(tmp_path, http)
    runtime.access_log.start()
    texts = []
    async with served(create_app(runtime, nothing())) as url:
        for key in (USER, ROOT, OWNER, "sk-wrong-33d"):
            for path in ("/v1/models", "/v1/completions", "/nothing"):
                answer = await client.post(url + path, headers=bearer(key), json={})
                texts.append(answer.text + str(answer.headers))
    write(tmp_path / "keys", f"user:{USER}\nbroken {ROOT}\n")
    ring = KeyRing(http.api_keys_file, http.admin_key_file, Clock())
    assert ring.find(USER.encode()) is None
    runtime.access_log.close()
    written = (tmp_path / "access.log").read_text()
    assert {json.loads(line).get("key") for line in written.splitlines()} == {"user", "root", "admin", None}
    for secret in (USER, ROOT, OWNER, "sk-wrong-33d", digest_of(USER).hex()):
        assert secret not in written + caplog.text + "".join(texts)
    runtime.manager.executor.shutdown()


def test_a_route_that_says_nothing_of_its_access_ends_the_start() -> None:
    async def handler(request: Any) -> None: ...

    with pytest.raises(TypeError, match="/new"):
        access_of([Route("/new", handler)])


# ---------------------------------------------------------------- admin paths


def guard(http: HttpArgs, clock: Clock) -> Guard:
    ring = KeyRing(http.api_keys_file, http.admin_key_file, clock)
    return Guard(ServerArgs(http=http), {"/livez": Access.OPEN, "/flush_cache": Access.ADMIN}, ring, RateLimits(clock))


def ask(guard: Guard, path: str, key: str | None = None, method: str = "POST") -> str:
    """The name of the key that got in, or the code of the refusal."""
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    try:
        found = guard.admit({"path": path, "method": method, "headers": headers})
    except RequestError as error:
        return f"{error.status} {error.code}"
    return found.name if found else "anybody"


def test_admin_paths_need_an_admin_key_whatever_else_is_configured(tmp_path: Path) -> None:
    both = key_files(tmp_path)
    assert [ask(guard(both, Clock()), "/flush_cache", key) for key in (None, "wrong", USER, ROOT, OWNER)] == [
        "401 invalid_api_key", "401 invalid_api_key", "403 forbidden", "root", "admin",
    ]  # fmt: skip
    none = HttpArgs()
    assert [ask(guard(none, Clock()), "/flush_cache", key) for key in (None, USER)] == ["403 forbidden"] * 2
    assert ask(guard(none, Clock()), "/v1/models") == "anybody"
    only_admin = HttpArgs(admin_key_file=both.admin_key_file)
    assert [ask(guard(only_admin, Clock()), path, USER) for path in ("/v1/models", "/flush_cache")] == ["anybody", "401 invalid_api_key"]
    assert ask(guard(only_admin, Clock()), "/flush_cache", OWNER) == "admin"


def test_a_key_that_owes_tokens_may_still_ask_for_what_takes_none(tmp_path: Path) -> None:
    which = guard(HttpArgs(api_keys_file=str(write(tmp_path / "keys", f"user:{USER} tpm=10\n"))), Clock())
    which.charge(which.admit({"path": "/v1/completions", "method": "POST", "headers": [(b"authorization", b"Bearer " + USER.encode())]}), 100)
    assert ask(which, "/v1/completions", USER) == "429 rate_limit_exceeded"
    assert [ask(which, path, USER) for path in ("/v1/tokenize", "/tokenize", "/detokenize")] == ["user"] * 3


def test_a_short_key_that_is_written_out_is_warned_of_without_showing_it(caplog: pytest.LogCaptureFixture) -> None:
    parse_keys("anna:s3cret\nbob:sha256:" + "0" * 64 + "\ncarl:0123456789abcdef\n")
    parse_admin_key("s3cret")
    assert [record.getMessage().partition(" has ")[0] for record in caplog.records] == ["the API key anna", "the admin key"]
    assert "s3cret" not in caplog.text


# ---------------------------------------------------------------- files that change


def test_keys_come_and_go_with_their_file_and_a_bad_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, file = Clock(), write(tmp_path / "keys", f"user:{USER}\n")
    ring = KeyRing(str(file), None, clock)

    def known(key: str) -> bool:
        return ring.find(key.encode()) is not None

    assert known(USER) and not known(ROOT)
    write(file, f"user:{USER}\nroot:{ROOT}\n")
    clock.now += LOOK_EVERY / 2
    assert not known(ROOT), "looked at once a second at most"
    clock.now += LOOK_EVERY / 2
    assert known(USER) and known(ROOT)
    for spoil in (lambda: write(file, "broken\n"), lambda: write(file, f"root:{ROOT}\n", 0o644), file.unlink):
        spoil()
        clock.now += LOOK_EVERY
        caplog.clear()
        assert known(USER) and known(ROOT)
        assert "stay in force" in caplog.text
        clock.now += LOOK_EVERY
        caplog.clear()
        assert known(USER)
        assert not caplog.text, "told once"
    new = write(tmp_path / "new", f"other:{ROOT}\n")
    os.replace(new, file)
    clock.now += LOOK_EVERY
    assert not known(USER) and known(ROOT)


def test_a_file_that_cannot_be_read_at_first_lets_nobody_in(tmp_path: Path) -> None:
    ring = KeyRing(str(tmp_path / "none"), str(tmp_path / "none"), Clock())
    assert ring.asked_for and not ring.has_admin
    assert ring.find(b"") is None and ring.find(b"x") is None


# ---------------------------------------------------------------- rates


def test_a_bucket_fills_evenly_and_no_further_than_a_minutes_worth() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait(0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait(0.0) == pytest.approx(1)
    assert bucket.wait(0.5) == pytest.approx(0.5)
    assert bucket.wait(1.0) == 0
    bucket.wait(10_000.0)
    bucket.take(60, 10_000.0)
    assert bucket.wait(10_000.0) == pytest.approx(1)


def test_requests_and_tokens_a_minute_each_hold(tmp_path: Path) -> None:
    clock = Clock()
    limits = RateLimits(clock)
    slow, big, free = Key("slow", b"", rpm=2), Key("big", b"", tpm=600), Key("free", b"")
    limits.admit(slow)
    limits.admit(slow)
    with pytest.raises(RateLimited) as caught:
        limits.admit(slow)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "rate_limit_exceeded", 30)
    clock.now += 29.9
    with pytest.raises(RateLimited):
        limits.admit(slow)
    clock.now += 0.2
    limits.admit(slow)
    limits.admit(big)
    limits.charge(big, 1200)
    with pytest.raises(RateLimited) as caught:
        limits.admit(big)
    assert caught.value.retry_after == 61, "600 are owed, and one has to be there"
    clock.now += 61
    limits.admit(big)
    for _ in range(1000):
        limits.admit(free)
        limits.charge(free, 10**9)
    limits.admit(replace(slow, rpm=5))


async def test_who_is_too_fast_is_told_when_to_come_back(tmp_path: Path, client: httpx.AsyncClient) -> None:
    keys = write(tmp_path / "keys", f"slow:{USER} rpm=1\nother:{ROOT}\n")
    runtime = make_runtime(tmp_path, HttpArgs(api_keys_file=str(keys)))
    async with served(create_app(runtime, nothing())) as url:
        assert (await client.post(url + "/v1/completions", headers=bearer(USER), json={})).status_code == 503
        answer = await client.post(url + "/v1/completions", headers=bearer(USER), json={})
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.post(url + "/v1/completions", headers=bearer(ROOT), json={})).status_code == 503
        assert (await client.get(url + "/v1/models", headers=bearer(USER))).status_code == 200, "reading is not limited"
    counts = runtime.meter.snapshot().counters
    assert counts['llmd_requests_total{endpoint="/v1/completions",outcome="rejected"}'] == 3
    runtime.manager.executor.shutdown()


async def test_a_large_body_that_is_refused_costs_the_client_no_reset(tmp_path: Path) -> None:
    runtime = make_runtime(tmp_path, key_files(tmp_path))
    async with served(create_app(runtime, nothing())) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        sock: socket.socket = writer.get_extra_info("socket")
        assert sock is not None
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000000\r\n\r\n")
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await asyncio.wait_for(writer.drain(), 20)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 401 ")
        writer.close()
    runtime.manager.executor.shutdown()
