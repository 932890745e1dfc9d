"""The catalogue is whole, its page current, and other projects' names show the quantities that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmd.control import metrics_doc
from llmd.control.catalog import CATALOG, ZERO_COUNTERS, ZERO_HISTOGRAMS
from llmd.control.compat import COMPAT, metric_of, project
from llmd.control.exposition import render
from llmd.wire.messages import HistogramTotals

ROOT = Path(__file__).parents[3]
#: Between processes only.
PRIVATE = {"llmd_frontend_inflight"}
HISTOGRAM = HistogramTotals((0.1, 1.0), (1, 3, 4), 5.5)


def test_every_metric_that_the_code_makes_is_in_the_catalogue() -> None:
    made = re.compile(r"""(?:\.(?:inc|set|observe)\(\s*|series\()f?["'](llmd_[a-z_]+)["'{]""")
    found = {name for path in (ROOT / "daemon/llmd").rglob("*.py") for name in made.findall(path.read_text())}
    assert len(found) > 20
    assert found - PRIVATE <= CATALOG.keys()


def test_the_page_is_current() -> None:
    assert (ROOT / metrics_doc.FILE).read_text() == metrics_doc.text(), "make docs"


def test_names_follow_the_conventions() -> None:
    for name, metric in CATALOG.items():
        assert metric.help.endswith(".") and name.startswith("llmd_")
        assert (metric.kind == "counter") == name.endswith("_total"), name
    assert set(ZERO_COUNTERS) | set(ZERO_HISTOGRAMS) <= CATALOG.keys()
    for aliases in COMPAT.values():
        assert all(not isinstance(alias.source, str) or alias.source in CATALOG for alias in aliases)
        assert all(metric_of(alias).help.strip() for alias in aliases)


def everything() -> tuple[dict[str, float], dict[str, float], dict[str, HistogramTotals]]:
    gauges = {"llmd_requests_running": 3.0, "llmd_requests_waiting": 2.0, "llmd_kv_capacity_pages": 100.0, 'llmd_kv_pages{state="free"}': 75.0}
    counters = {
        "llmd_prefix_cache_queried_tokens_total": 400.0, "llmd_prefix_cache_hit_tokens_total": 100.0, "llmd_prompt_tokens_total": 7.0,
        'llmd_requests_total{endpoint="/v1/completions",outcome="stop"}': 4.0, 'llmd_requests_total{endpoint="/generate",outcome="error"}': 1.0,
    }  # fmt: skip
    return gauges, counters, {"llmd_time_to_first_token_seconds": HISTOGRAM}


def test_other_projects_names_show_the_same_quantities() -> None:
    gauges, counters, histograms = everything()
    assert project((), "m", gauges, counters, histograms) == {}
    known = project(("sglang", "vllm"), 'm"x', gauges, counters, histograms)
    text = render(gauges, counters, histograms, known)
    values = {(sample.name, sample.labels.get("model_name")): sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    for name, value in (
        ("sglang:num_running_reqs", 3), ("sglang:num_queue_reqs", 2), ("sglang:token_usage", 0.25), ("sglang:cache_hit_rate", 0.25),
        ("sglang:num_requests_total", 5),
        ("vllm:num_requests_running", 3), ("vllm:kv_cache_usage_perc", 0.25), ("vllm:request_success_total", 4), ("vllm:prompt_tokens_total", 7),
        ("vllm:time_to_first_token_seconds_count", 4), ("sglang:time_to_first_token_seconds_sum", 5.5),
    ):  # fmt: skip
        assert values[name, "m'x"] == value, name
    assert not any(name.startswith("vllm:num_preemptions") for name, _ in values), "what does not exist is not invented"


def test_promtool_finds_nothing_wrong() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run([tool, "check", "metrics"], input=render(*everything()), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
