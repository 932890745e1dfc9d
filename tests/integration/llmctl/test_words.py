"""What llmctl says beside its data: where there is nothing, where a filter hides some, where a server wants a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.daemon import free_port
from tests.integration.llmctl.fake import Fake, serving
from tests.integration.llmctl.test_reading import ROW, ctl


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with serving(tmp_path) as served:
        yield served


@pytest.fixture
def locked() -> Iterator[str]:
    """The URL of a server that answers everything with 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("verb", ["crashes", "audit", "requests"])
def test_an_empty_list_says_none(fake: Fake, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers[f"/v1/{verb}"] = (200, {verb: []})
    assert ctl(fake, verb) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1 and shown.err == "none\n"
    assert ctl(fake, verb, "-o", "json") == 0
    assert capsys.readouterr().err == ""


def test_requests_say_what_a_filter_hides(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/requests"] = (200, {"requests": [ROW, {**ROW, "rid": "cmpl-2"}], "total": 2})
    assert ctl(fake, "requests", "--client-id", "job-8") == 0
    said = capsys.readouterr().err
    assert said.startswith("none\n0 of 2 requests; the others are not --client-id job-8") and "X-Request-Id" in said and "-n N" not in said
    assert ctl(fake, "requests", "--client-id", "job-7", "-n", "1") == 0
    assert "1 of 2 requests; -n N shows more" in capsys.readouterr().err


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
def test_bench_says_how_to_give_a_key(locked: str, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(tmp_path, "bench", locked, *model, "--streams", "1") == 77
    said = capsys.readouterr().err
    assert "--api-key-file" in said and "$OPENAI_API_KEY" in said


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
def test_bench_says_that_nobody_listens(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert ctl(tmp_path, "bench", f"http://127.0.0.1:{port}", *model, "--streams", "1") == 3
    said = capsys.readouterr().err
    assert said.splitlines()[0] == f"llmctl: nobody listens on 127.0.0.1:{port}: Connection refused" and "--model" not in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "ftp://127.0.0.1", "http://"])
def test_bench_refuses_what_is_no_address(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(tmp_path, "bench", url) == 2
    assert capsys.readouterr().err.startswith(f"llmctl: not an HTTP address: {url}\n")


def test_times_are_utc_and_say_so(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the machine's own zone is another."""
    at = 1767225600.0
    fake.answers["/v1/events"] = (200, {"events": [{"seq": 1, "at": at, "kind": "state", "severity": "info", "message": "m", "data": {}}], "last": 1})
    fake.answers["/v1/crashes"] = (200, {"crashes": [{"id": "c1", "at": at, "process": "scheduler-0", "how": "SIGKILL", "uptime_s": 1.0}]})
    fake.answers["/v1/audit"] = (200, {"audit": [{"ts": "2026-01-01T00:00:00Z", "uid": 0, "verb": "flush", "result": "succeeded"}]})
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            for command in (["events"], ["crashes"], ["crashes", "c1"], ["audit"]):
                assert ctl(fake, *command) == 0
                assert "2026-01-01T00:00:00Z" in capsys.readouterr().out, command
        finally:
            patch.undo()
            time.tzset()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"reason": "hang", "status": -9, "why": "no heartbeat for 30.1 s"}, "hung (no heartbeat for 30.1 s), so llmd killed it"),
        ({"reason": "signal", "status": -9, "oom": True}, "killed by the kernel: out of memory (SIGKILL)"),
        ({"reason": "signal", "status": -9, "oom": False}, "killed from outside, not for want of memory (SIGKILL)"),
        ({"reason": "signal", "status": -11}, "crashed: a bad memory access (SIGSEGV)"),
        ({"reason": "signal", "status": -40}, "ended by signal 40"),
        ({"reason": "exit", "status": 70}, "ended: gave up after an internal error (status 70)"),
        ({"reason": "exit", "status": 3}, "ended (status 3)"),
        ({"reason": "spawn", "status": 71}, "could not be started"),
        ({"how": "SIGKILL"}, "SIGKILL"),
    ],
)
def test_a_crash_says_what_happened_and_then_its_last_words(fake: Fake, record: dict[str, object], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {
        "id": "c1",
        "at": 1767225600.0,
        "process": "scheduler-0",
        "pid": 7,
        "uptime_s": 1.0,
        "last_words": "2026-01-01T00:00:00.000Z INFO    scheduler-0: " + "all is well " * 20,
        **record,
    }
    fake.answers["/v1/crashes"] = (200, {"crashes": [whole]})
    assert ctl(fake, "crashes") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert row[head.index("WHAT") :].startswith(text) and row.endswith("...") and "2026-01-01T00:00:00Z" in row
    assert ctl(fake, "crashes", "c1") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split(maxsplit=1) == ["what", text] and second.split(maxsplit=3)[:3] == ["last", "words", "all"]
    assert ctl(fake, "crashes", "-o", "json") == 0
    assert '"at": 1767225600.0' in capsys.readouterr().out, "programs get the number"
