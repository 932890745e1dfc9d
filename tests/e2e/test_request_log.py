"""Prompts and outputs: in no log by default, at whatever level; when asked for, in one file for its owner alone, cut at a character."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import HANGS, SLOW, Daemon, wait_for, whole_lines

SENTINEL = "xyzzy-sentinel-7"
CONFIG: dict[str, Any] = {
    "model": {"path": "dummy"},
    "admin": {"group": None},
    "observability": {"log_level": "debug"},
    "supervision": {"hang_timeout": HANGS, "restart": {"max": 100}},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("private"), config=CONFIG, failpoints="scheduler.prompt(RAISEME)=raise;scheduler.prompt(HANGME)=hang") as started:
        yield started.start()


def everything(daemon: Daemon) -> str:
    """All that llmd has written, but for the one file."""
    files = [path for path in daemon.directory.rglob("*") if path.is_file() and not path.name.startswith("requests.jsonl") and "private" not in path.parts[-2]]
    return daemon.log_text() + "".join(written(path) for path in files)


def written(path: Path) -> str:
    """What stands in it; nothing if it was replaced by another a moment ago."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def provoke(daemon: Daemon) -> None:
    """The sentinel in what is answered, refused and broken."""
    assert daemon.complete(SENTINEL, stop=[f"{SENTINEL}-stop"]).status_code == 200
    assert daemon.complete(SENTINEL, max_tokens=-1).status_code == 400
    assert daemon.complete(f"RAISEME {SENTINEL}").status_code == 500
    assert daemon.chat(SENTINEL).status_code == 200
    assert daemon.chat(SENTINEL, tools=[{"type": "function", "function": {"name": SENTINEL}}]).status_code == 400
    assert daemon.chat(messages=[{"role": "user", "name": SENTINEL, "content": SENTINEL}]).status_code == 200
    assert httpx.post(f"{daemon.url}/v1/completions", content=f'{{"prompt": "{SENTINEL}"', timeout=30 * SLOW).status_code == 400


def test_by_default_no_text_is_written_anywhere(daemon: Daemon) -> None:
    provoke(daemon)
    daemon.admin("GET", "/v1/requests")
    assert SENTINEL not in everything(daemon)
    assert not (daemon.directory / "log" / "requests.jsonl").exists()


def test_the_stacks_of_a_process_that_hangs_hold_no_text(daemon: Daemon) -> None:
    answer = daemon.complete(f"HANGME {SENTINEL}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crash")
    wait_for("the stack is in the log, as faulthandler writes it", lambda: re.search(r"failpoints\.py\W+ line \d+ in ", daemon.log_text()), 20)
    daemon.wait_ready()
    assert SENTINEL not in everything(daemon) + daemon.admin("GET", "/v1/crashes").text


def test_when_asked_for_it_is_in_the_one_file_and_nowhere_else(daemon: Daemon, tmp_path: Path) -> None:
    config = json.loads(daemon.config_path.read_text())
    here = tmp_path / "requests"
    on = {**config["observability"], "request_log": {"enabled": True, "dir": str(here)}}
    daemon.config_path.write_text(json.dumps({**config, "observability": on}))
    assert daemon.admin("POST", "/v1/config/reload").status_code == 200
    wait_for("it is said", lambda: "the request log is on" in daemon.log_text(), 20)
    assert httpx.get(daemon.url + "/server_info", timeout=20 * SLOW).json()["configuration"]["observability.request_log.enabled"] is True
    provoke(daemon)
    cjk = {count: "".join(chr(0x4E00 + n % 500) for n in range(count)) for count in (333, 334, 335)}
    for text in cjk.values():
        assert daemon.complete(text, max_tokens=2).status_code == 200
    assert daemon.complete("long " * 1200, max_tokens=1).status_code == 200
    path = here / "requests.jsonl"
    wait_for("all are written", lambda: len(entries(path)) >= 8, 30)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    texts = [entry["prompts"][0] for entry in entries(path)]
    assert any(SENTINEL in text for text in texts) and set(cjk.values()) <= set(texts)
    answered = next(entry for entry in entries(path) if entry["outcome"] in ("stop", "length") and SENTINEL in entry["prompts"][0])
    assert answered["outputs"][0] and answered["endpoint"] == "/v1/completions" and answered["rid"]
    assert SENTINEL not in everything(daemon)
    daemon.config_path.write_text(json.dumps(config))
    assert daemon.admin("POST", "/v1/config/reload").status_code == 200
    before = len(entries(path))
    provoke(daemon)
    assert len(entries(path)) == before, "off again"
