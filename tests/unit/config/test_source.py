"""A configuration that is read again, and what has changed since."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmd.config.explain import explain
from llmd.config.source import overlay, read
from llmd.errors import ConfigError


def test_changes_name_values_effects_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "llmd.yaml"
    file.write_text("http:\n  keep_alive: 60s\nmemory: {page_size: 8}\n")
    env = {"LLMD_SCHEDULER__QUEUE_TIMEOUT": "5s", "HOME": "/x"}
    first = read(str(file), ("http.port=0",), env, allow_failpoints=False)
    assert first.environ == {"LLMD_SCHEDULER__QUEUE_TIMEOUT": "5s"}
    assert first.changes(first.read_again(allow_failpoints=False)) == []
    file.write_text("http:\n  keep_alive: 90s\n  port: 7\n  workers: 2\nmemory: {page_size: 16}\nscheduler: {queue_timeout: 9s}\n")
    second = first.read_again(allow_failpoints=False)
    found = {change.key: (change.before, change.after, change.reload) for change in first.changes(second)}
    assert found == {"memory.page_size": ("8", "16", "engine"), "http.keep_alive": ("60s", "90s", "live"), "http.workers": ("1", "2", "restart")}, (
        "flags and variables still go before the file"
    )
    assert {c.key: c.origin for c in first.changes(second)}["http.keep_alive"] == f"file {file}:2"
    assert overlay(first.args, second.args, ["http.keep_alive"]).http.keep_alive == 90.0
    assert overlay(first.args, second.args, ["http.keep_alive"]).http.workers == 1


def test_faults_are_all_told_and_nothing_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "llmd.yaml"
    file.write_text("{}")
    source = read(str(file), (), {}, allow_failpoints=False)
    file.write_text("http: {prot: 1}\nmodel: {threads: no}\n")
    with pytest.raises(ConfigError) as fault:
        source.read_again(allow_failpoints=False)
    assert len(fault.value.faults) == 2


def test_a_key_is_explained_and_a_wrong_one_corrected() -> None:
    assert explain("http.keep_alive")[0]["reload"] == "live"
    assert {row["key"] for row in explain("supervision.restart")} == {f"supervision.restart.{leaf}" for leaf in ("max", "window", "backoff")}
    with pytest.raises(KeyError, match=r"keep_alive"):
        explain("http.keepalive")
