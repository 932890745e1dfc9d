"""llmctl's reading verbs against an admin plane on a unix socket."""

from __future__ import annotations

import itertools
import json
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmctl.main import main
from tests.integration.llmctl.fake import STATUS, Fake, serving

ROW: dict[str, Any] = {
    "rid": "cmpl-1", "request": "cmpl-1", "client_id": "job-7", "frontend": 0, "rank": 0, "phase": "decode", "age_s": 12.0, "waited_s": 0.1,
    "first_token_s": 0.4, "silent_s": 0.2, "prompt_tokens": 900, "cached_tokens": 16, "output_tokens": 50, "max_new_tokens": 100, "tokens_s": 4.31,
    "pages": 60, "priority": 0, "streamed": True,
}  # fmt: skip
EVENTS = [
    {"seq": 1, "at": 1.0, "kind": "state", "severity": "info", "message": "warming -> ready", "data": {"target": "ready"}},
    {"seq": 2, "at": 2.0, "kind": "process", "severity": "error", "message": "scheduler-0 (pid 9) killed by SIGKILL\x1b[2J", "data": {}},
]
CONFIG = {
    "config_file": "/etc/llmd/llmd.yaml",
    "values": [
        {"key": "http.port", "value": 8000, "text": "8000", "origin": "default", "resolved": False, "reload": "restart"},
        {"key": "http.keep_alive", "value": 60.0, "text": "60s", "origin": "file /etc/llmd/llmd.yaml:3", "resolved": False, "reload": "live"},
        {"key": "model.threads", "value": 2, "text": "2", "origin": "default", "resolved": True, "reload": "engine"},
    ],
}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with serving(tmp_path) as served:
        yield served


def ctl(place: Fake | Path, *argv: str) -> int:
    return main(["--socket", str(place.run_dir if isinstance(place, Fake) else place), *argv])


def test_requests_are_sorted_filtered_and_counted(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    young = {**ROW, "rid": "cmpl-2", "client_id": None, "age_s": 1.0, "phase": "waiting", "pages": 0, "tokens_s": 0.0, "silent_s": None}
    fake.answers["/v1/requests"] = (200, {"requests": [young, ROW], "total": 7, "age_s": 0.1})
    assert ctl(fake, "requests") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "RID     CLIENT ID  PHASE     AGE  PROMPT  TOKENS  TOK/S  SILENT  PAGES",
        "cmpl-1  job-7      decode    12s     900      50   4.31    0.2s     60",
        "cmpl-2  -          waiting  1.0s     900      50    0.0       -      0",
    ]
    assert "2 of 7 requests" in shown.err
    assert ctl(fake, "requests", "--phase", "waiting", "-o", "json") == 0
    assert [row["rid"] for row in json.loads(capsys.readouterr().out)["requests"]] == ["cmpl-2"]
    assert ctl(fake, "requests", "--client-id", "job-7", "-n", "1", "-o", "wide") == 0
    assert "FIRST TOKEN" in capsys.readouterr().out


def test_kv_shows_who_holds_it(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = {"rank": 0, "name": "0a1b2c3d", "start": 0, "tokens": 512, "pages": 32, "below": 4, "hits": 9, "users": 1}
    cache = {"queried_tokens": 400, "hit_tokens": 100, "hit_rate": 0.25}
    fake.answers["/v1/kv"] = (200, {**STATUS["kv"], "prefix_cache": cache, "prefixes": [prefix], "holders": [ROW]})
    assert ctl(fake, "kv") == 0
    out = capsys.readouterr().out
    assert "25.0% of 400 prompt tokens were known" in out
    assert "0a1b2c3d     0     512     32" in out and "cmpl-1" in out


def test_wide_shows_more_of_kv(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    prefixes = [{"rank": 0, "name": f"p{number:07}", "start": 0, "tokens": 512, "pages": 32, "below": 4, "hits": 9, "users": 1} for number in range(12)]
    cache = {"queried_tokens": 400, "hit_tokens": 100, "hit_rate": 0.25}
    more = {"prefix_cache": cache, "prefixes": prefixes, "prefixes_total": 70, "holders": [ROW], "bytes_total": 100 << 20, "retracted": 3, "age_s": 0.2}
    fake.answers["/v1/kv"] = (200, {**STATUS["kv"], **more})
    assert ctl(fake, "kv") == 0
    narrow = capsys.readouterr().out
    assert "p0000007" in narrow and "p0000008" not in narrow
    assert ctl(fake, "kv", "-o", "wide") == 0
    wide = capsys.readouterr().out
    for said in ("16 tokens, 1.0 MiB each, 100 MiB in all", "25.0%: 100 of 400 prompt tokens", "70 known", "3 times", "p0000011", "CACHED", "LIMIT", "RANK"):
        assert said in wide and said not in narrow, said


def test_config_shows_what_differs_and_where_it_was_written(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/config"] = (200, CONFIG)
    assert ctl(fake, "config") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["KEY              VALUE", "http.keep_alive  60s", "model.threads    2"]
    assert "--all" in shown.err
    assert ctl(fake, "config", "show", "http", "--origin") == 0
    assert "http.keep_alive  60s    file /etc/llmd/llmd.yaml:3  live" in capsys.readouterr().out
    assert ctl(fake, "config", "show", "http.prot") == 65
    assert ctl(fake, "config", "diff", "http") == 2


def test_config_diff_is_the_plan_of_a_reload(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    change = {"key": "http.keep_alive", "before": "60s", "after": "90s", "reload": "live", "origin": "file x:1"}
    fake.answers["/v1/config/reload"] = (200, {"plan": {"steps": ["set it"], "changes": [change], "processes_restarted": []}})
    assert ctl(fake, "config", "diff") == 0
    assert "http.keep_alive: 60s -> 90s  [live]" in capsys.readouterr().out
    assert fake.seen[-1] == ("POST", "/v1/config/reload", {"dry_run": True})
    fake.answers["/v1/config/reload"] = (200, {"plan": {"steps": [], "changes": []}})
    assert ctl(fake, "config", "diff") == 0
    assert capsys.readouterr().out == "nothing has changed\n"


def test_a_key_is_explained_with_and_without_a_daemon(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/config"] = (200, CONFIG)
    assert ctl(fake, "config", "explain", "http.keep_alive") == 0
    out = capsys.readouterr().out
    assert "60s (file /etc/llmd/llmd.yaml:3)" in out and "nobody notices" in out
    assert ctl(tmp_path / "nowhere", "config", "explain", "http.keep_alive", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)[0]["default"] == "75s"
    assert ctl(fake, "config", "explain", "http.keepalive") == 65
    assert "keep_alive" in capsys.readouterr().err
    assert ctl(fake, "config", "schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["http"]


def test_events_are_shown_filtered_and_harmless(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/events"] = (200, {"events": EVENTS, "last": 2})
    assert ctl(fake, "events", "--kind", "process") == 0
    out = capsys.readouterr().out
    assert "scheduler-0 (pid 9) killed by SIGKILL [2J" in out and "warming" not in out and "\x1b" not in out
    assert ctl(fake, "events", "-o", "json", "-n", "1") == 0
    assert [event["seq"] for event in json.loads(capsys.readouterr().out)] == [2]


def test_audit_names_people(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    line = {
        "ts": "2026-01-01T00:00:00Z", "uid": 0, "gid": 0, "pid": 7, "loginuid": None, "verb": "flush", "params": {"timeout_s": 3}, "reason": "nightly",
        "result": "failed", "code": "busy", "operation_id": "op-1",
    }  # fmt: skip
    fake.answers["/v1/audit"] = (200, {"audit": [line, {**line, "verb": "stop", "loginuid": 4294967290}]})
    assert ctl(fake, "audit") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split() == ["2026-01-01T00:00:00Z", "root", "flush", "failed", "(busy)", "nightly", "timeout_s=3"]
    assert "4294967290" in rows[2]
    assert ctl(fake, "audit", "--verb", "stop", "-o", "json") == 0
    assert [entry["verb"] for entry in json.loads(capsys.readouterr().out)] == ["stop"]


def test_audit_says_what_changed_what_came_of_it_and_why_it_failed(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"ts": "2026-01-01T00:00:00Z", "uid": None, "key": "ops", "address": "192.0.2.7", "pid": None, "reason": "", "operation_id": "op-1"}
    reload = {
        **base, "verb": "config/reload", "params": {}, "result": "succeeded", "code": None, "data": {"changed": ["http.port"]}, "message": "",
        "changes": [{"key": "http.keep_alive", "before": "75s", "after": "9s"}, {"key": "http.strict", "before": "false", "after": "true"}],
    }  # fmt: skip
    abort = {**base, "verb": "abort", "params": {"all": True}, "result": "succeeded", "code": None, "data": {"aborted": ["a", "b"]}}
    failed = {**base, "verb": "reload", "params": {"path": "/m"}, "result": "failed", "code": "timeout", "message": "too slow\nby far"}
    fake.answers["/v1/audit"] = (200, {"audit": [reload, abort, failed]})
    assert ctl(fake, "audit") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    what = head.index("WHAT")
    assert [row[what:] for row in rows] == [
        "http.keep_alive: 75s -> 9s", "http.strict: false -> true", "all=true", "aborted: a b", "path=/m", "too slow", "by far",
    ]  # fmt: skip
    assert all("key ops" in row for row in (rows[0], rows[2], rows[4])) and not rows[1][:what].strip()
    assert ctl(fake, "audit", "-o", "wide") == 0
    assert "192.0.2.7" in capsys.readouterr().out


def test_weights(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"weights_version": "v2", "name": "m", "path": "/m", "kind": "gguf", "architecture": "llama", "quantization": "Q4_1"}
    fake.answers["/v1/weights"] = (200, {**weights, "weights_bytes": 94 << 20, "context_length": 8192})
    assert ctl(fake, "weights") == 0
    assert "gguf, llama, Q4_1" in capsys.readouterr().out


def test_wait_waits_for_what_was_named(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["/v1/status"] = (200, STATUS | {"state": "loading"})
    timer = threading.Timer(0.3, lambda: fake.answers.update({"/v1/status": (200, STATUS)}))
    timer.start()
    assert ctl(fake, "wait", "--timeout", "20s") == 0
    timer.join()
    capsys.readouterr()
    assert ctl(fake, "wait", "--for=version=other", "--timeout", "200ms") == 124
    assert "until llmd serves weights version other, in vain" in capsys.readouterr().err
    assert ctl(fake, "wait", "--for=version=model.gguf@0123456789ab") == 0
    fake.answers["/v1/status"] = (200, STATUS | {"state": "draining", "in_flight": 0})
    assert ctl(fake, "wait", "--for", "drained") == 0
    assert ctl(fake, "wait", "--for", "nonsense") == 2
    (tmp_path / "empty").mkdir()
    assert ctl(tmp_path / "empty", "wait", "--for", "stopped", "--timeout", "5s") == 0
    fake.answers["/v1/operations/op-1"] = (200, {"id": "op-1", "verb": "restart", "state": "rolled_back", "message": "no"})
    assert ctl(fake, "wait", "--operation", "op-1") == 1
    capsys.readouterr()


def test_doctor_says_in_every_state_why_the_daemon_is_not_whole(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    why = "scheduler-0 died 4 times within 10 min"
    for state, reason, text in (("ready", why, f"ready: {why}"), ("recovering", "killed by SIGKILL", f"recovering: killed by SIGKILL; {why}")):
        fake.answers["/v1/status"] = (200, {**STATUS, "state": state, "reason": reason, "degraded": [why]})
        ctl(fake, "doctor", "-o", "json")
        found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert (found["daemon"]["state"], found["daemon"]["text"]) == ("warning", text)


def test_doctor_says_what_is_wrong_and_ends_with_1(fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake.run_dir.chmod(0o750)
    config = tmp_path / "llmd.yaml"
    config.write_text("http: {prot: 1}\n")
    assert ctl(fake, "doctor", "-c", str(config), "-o", "json") == 1
    findings = json.loads(capsys.readouterr().out)
    by_name = {finding["what"]: finding for finding in findings}
    assert by_name["configuration"]["state"] == "wrong" and "http" in by_name["configuration"]["text"]
    assert by_name["daemon"]["text"] == "ready"
    assert {"system", "run directory", "socket", "memory", "open files", "disk"} <= by_name.keys()
    fake.answers["/v1/config/reload"] = (400, {"error": {"message": "line 1: a fault\nline 2: another", "code": "bad_config"}})
    assert ctl(fake, "doctor", "-c", str(config)) == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    first, second = next((a, b) for a, b in itertools.pairwise(shown.splitlines()) if "line 1" in a)
    assert first.index("line 1") == second.index("line 2"), "the second line stands below the first"


def test_a_report_is_private_and_without_secrets(fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    secrets = "Authorization: Bearer abcdefgh1234, api_key='hunter22', sk-abcdefghijklmnopqrstuvwx"
    (log / "control-0.log").write_text(f"{secrets}\nplain words\n")
    (fake.run_dir / "llmd.lock").write_text(json.dumps({"pid": 0, "log_dir": str(log)}))
    fake.answers["/v1/config"] = (200, CONFIG)
    file = tmp_path / "r0.tgz"
    assert ctl(fake, "report", "--output-file", str(file)) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as archive:
        entries = {member.name.partition("/"): archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    (directory,) = {top for top, _, _ in entries}
    assert directory.startswith("llmd-report-"), "it unpacks beside the file, into a directory of another name"
    texts = {name: text for (_, _, name), text in entries.items()}
    assert {"status.json", "config.json", "doctor.json", "log/control-0.log", "audit.json"} <= texts.keys()
    everything = "".join(texts.values())
    assert "plain words" in everything
    assert not [secret for secret in ("abcdefgh1234", "hunter22", "sk-abcdef") if secret in everything]
    assert ctl(fake, "report", "--output-file", str(file)) == 65, "never over another file"
    assert ctl(tmp_path / "nowhere", "report", "--output-file", str(tmp_path / "down.tar.gz")) == 0, "also when llmd is down"
    assert os.path.exists(tmp_path / "down.tar.gz")
    capsys.readouterr()
