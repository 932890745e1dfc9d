"""Requests made up from the OpenAPI document, right ones and wrong ones: none gets a 5xx, and every answer is as described."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.frontend.openapi.serve import DOCUMENT
from tests.daemon import Daemon, wait_for

pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

ADMIN = "sk-admin-of-the-test"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"
#: Characters of faults that a failed test shows.
SHOWN = 40_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    key = tmp_path / "admin"
    key.write_text(ADMIN + "\n")
    key.chmod(0o600)
    config = {"model": {"path": "dummy", "context_length": 128}, "http": {"admin_key_file": str(key)}}
    with Daemon(tmp_path, config=config, failpoints="").start() as started:
        yield started


def run(daemon: Daemon, *, examples: int, seed: int) -> None:
    argv = [str(Path(sys.executable).with_name("st")), "run", str(DOCUMENT), "--url", daemon.url, "-H", f"Authorization: Bearer {ADMIN}"]
    argv += ["--phases", "coverage,fuzzing", "--max-examples", str(examples), "--seed", str(seed), "--checks", CHECKS]
    argv += ["--generation-database", "none", "--request-timeout", "60", "--no-color", "--continue-on-failure"]
    argv += ["--output-sanitize", "false", "--output-truncate", "false"]
    before = {child.pid for child in daemon.children()}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=daemon.directory, env={**os.environ, "NO_PROXY": "127.0.0.1"}, check=False)
    if done.returncode != 0:
        pytest.fail(told(done.stdout + done.stderr, daemon.directory / "schemathesis.txt"), pytrace=False)
    assert {child.pid for child in daemon.children()} == before, "no process has been replaced"
    wait_for("nothing runs any more", lambda: daemon.requests() == (0, 0), 20)
    assert daemon.text("abc", max_tokens=3) == "abc"


def told(output: str, file: Path) -> str:
    """What the generator says of each fault: the request as a curl line, and the answer. All of it is in `file`."""
    file.write_text(output)
    starts = [at for name in ("ERRORS", "FAILURES") if (at := output.find(f" {name} ")) >= 0]
    shown = output[min(starts, default=0) :].partition(" SUMMARY ")
    return f"schemathesis has found faults (all of its output: {file}):\n{shown[0][:SHOWN]}\n{shown[2][-2000:] or output[-2000:]}"


def test_no_request_that_can_be_made_up_gets_a_5xx(daemon: Daemon) -> None:
    run(daemon, examples=5, seed=1)
    assert daemon.stop() == 0


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "max_tokens": 5, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 5, "return_token_ids": True},
    "/generate": {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, "logprob_start_len": 0},
}


def test_every_event_of_a_stream_is_as_described(daemon: Daemon) -> None:
    document = json.loads(DOCUMENT.read_text())
    for path, body in STREAMS.items():
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
        piece, last = schema["anyOf"]
        validator = jsonschema_rs.validator_for(piece["contentSchema"] | {"components": document["components"]})
        answer = httpx.post(daemon.url + path, json=body | {"stream": True}, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60)
        *events, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events and end == last["const"]
        for event in events:
            assert [str(error) for error in validator.iter_errors(json.loads(event))] == [], (path, event)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_nor_do_many_more(daemon: Daemon, seed: int) -> None:
    run(daemon, examples=300, seed=seed)
    assert daemon.stop() == 0
