"""The embedded model, as a person meets it: banner, the curl line, a sensible answer, reload of weights."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.kernels.shared_library import library
from tests.daemon import SLOW, Daemon, wait_for

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "reference_greedy.json").read_text())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # As on a terminal: a log of JSON lines has no banner.
    config = {"model": {"dtype": "float32"}, "observability": {"log_format": "text"}}
    with Daemon(tmp_path_factory.mktemp("embedded"), config=config).start(timeout=300) as running:
        yield running
        assert running.stop() == 0


def test_the_banner_has_a_curl_line_that_answers(daemon: Daemon) -> None:
    lines = wait_for("the banner", lambda: "curl " in daemon.log_text() and daemon.log_text().splitlines(), 10)
    start = next(i for i, line in enumerate(lines) if "curl " in line)
    command = lines[start][lines[start].index("curl ") :]
    while command.endswith("\\"):
        start += 1
        command = command[:-1] + lines[start]
    answer = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60 * SLOW, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_greedy_answers_equal_the_reference(daemon: Daemon) -> None:
    for case in [c for c in REFERENCE["cases"] if c["mode"] == "chat"][:3]:
        expected = case["f32w"]
        if expected["min_gap"] < 0.02:
            continue
        answer = daemon.chat(case["prompt"], max_tokens=len(expected["token_ids"]))
        assert answer.json()["choices"][0]["message"]["content"] == expected["text"]
        assert answer.json()["choices"][0]["finish_reason"] == expected["finish"]
        assert answer.json()["usage"]["prompt_tokens"] == len(case["prompt_ids"])


@pytest.mark.skipif(library() is None, reason="the native kernels are not built")
def test_the_whole_daemon_is_small(daemon: Daemon) -> None:
    """With the weights in float32: as they are stored, it is 400 MiB less."""
    daemon.chat("hello", max_tokens=8)
    assert daemon.process is not None
    sizes = {pid: proportional(pid) for pid in [daemon.process.pid, *(child.pid for child in daemon.children())]}
    assert sum(sizes.values()) < 900 * 2**20, sizes


def proportional(pid: int) -> int:
    """Bytes of memory, with what is shared divided among those who share it."""
    return 1024 * sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
