"""A real Prometheus scrapes llmd and answers PromQL. Skipped, with the reason, where its Debian package `prometheus` is not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW, Daemon, free_port, wait_for

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="no Prometheus here (Debian package prometheus)")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config: dict[str, Any] = {"model": {"path": "dummy"}, "admin": {"group": None}}
    with Daemon(tmp_path_factory.mktemp("scraped"), config=config, failpoints="") as started:
        yield started.start()


@pytest.fixture(scope="module")
def prometheus(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    home: Path = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    job = f"- {{job_name: llmd, scrape_interval: 1s, static_configs: [{{targets: ['127.0.0.1:{daemon.port}']}}]}}"
    (home / "prometheus.yml").write_text(f"scrape_configs:\n{job}\n")
    argv = ["prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def query(url: str, promql: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": promql}, timeout=10 * SLOW)
    except httpx.TransportError:
        return []
    found: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.status_code == 200 else []
    return found


def test_it_scrapes_and_answers(daemon: Daemon, prometheus: str) -> None:
    daemon.text("hello", max_tokens=8)

    def value(promql: str) -> float:
        found = query(prometheus, promql)
        return float(found[0]["value"][1]) if found else -1.0

    wait_for("it has scraped", lambda: value('up{job="llmd"}') == 1, 60)
    wait_for("the tokens are there", lambda: value("llmd_generation_tokens_total") == 8, 30)
    wait_for("the request is there", lambda: value('sum(llmd_requests_total{endpoint="/v1/completions"})') == 1, 30)
    assert value('llmd_state{state="ready"}') == 1
    assert value("sum(llmd_kv_pages)") == value("llmd_kv_capacity_pages") > 0
    assert value("histogram_quantile(0.9, sum by (le) (llmd_time_to_first_token_seconds_bucket))") > 0
    assert value("histogram_quantile(0.9, sum by (le) (llmd_request_duration_seconds_bucket))") > 0


def test_every_question_of_the_page_is_a_query_that_has_an_answer(daemon: Daemon, prometheus: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    questions = re.findall(r"^\| [^|`]+ \| `([^`]*llmd_[^`]*)` \|$", page, re.MULTILINE)
    assert len(questions) >= 7
    for promql in questions:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": promql}, timeout=10 * SLOW)
        assert answer.status_code == 200, (promql, answer.text)


def test_promtool_finds_nothing_wrong_with_a_real_exposition(daemon: Daemon) -> None:
    daemon.text("hello", max_tokens=2)
    text = httpx.get(f"{daemon.url}/metrics", timeout=10 * SLOW).text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
