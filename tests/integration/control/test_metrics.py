"""Metrics over restarts and damage: counters go on, gauges of the dead go with them, nothing piles up, a scrape always answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from llmd.config.server_args import MetricsArgs, ObservabilityArgs
from llmd.control.catalog import CATALOG
from tests.daemon import SLOW
from tests.integration.control.harness import READY_INFO, Stage, stage, wait_for

RESTARTS = 30


@pytest.fixture
def made() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as whole:
        yield whole


def scrape(made: Stage) -> dict[str, float]:
    text = made.http.get("/metrics").text
    return {sample.name + str(sorted(sample.labels.items())): sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_counters_go_on_over_many_restarts_and_nothing_piles_up(made: Stage) -> None:
    made.start_control()
    scheduler, _, _ = made.to_ready()
    foreign = Path(made.boot.ports.run_dir) / "foreign.db"
    foreign.write_bytes(b"x" * 100)
    worker, last = scheduler, -1.0
    for incarnation in range(2, RESTARTS + 2):
        worker.meter.set("llmd_requests_running", 7)
        worker.meter.observe("llmd_queue_time_seconds", 0.01)
        worker.meter.inc("llmd_prefix_cache_hit_tokens_total", 5)  # last: a heartbeat that has it has all
        wait_for(lambda wanted=5.0 * (incarnation - 1): made.metric("llmd_prefix_cache_hit_tokens_total") == wanted, "the heartbeat is counted")
        worker.link.close()
        made.supervisor.died("scheduler-0")
        made.supervisor.epoch = incarnation
        worker = made.worker("scheduler", pid=1000 + incarnation, incarnation=incarnation, epoch=incarnation)
        worker.link.ready(READY_INFO)
        now = made.metric("llmd_prefix_cache_hit_tokens_total")
        assert now is not None and now >= last
        last = now
    made.wait_state("ready")
    wait_for(lambda: made.metric("llmd_requests_running") == 0, "what the dead have said of themselves goes with them")
    assert made.metric("llmd_queue_time_seconds_count") == RESTARTS
    wait_for(lambda: made.metric('llmd_process_restarts_total{role="scheduler",reason="signal"}') == RESTARTS, "the supervisor's word")
    series = scrape(made)
    assert len([key for key in series if "scheduler" in key]) < 20 and not any("'pid'" in key for key in series)
    began = time.perf_counter()
    assert made.http.get("/metrics").status_code == 200
    assert time.perf_counter() - began < 2.0 * SLOW
    assert foreign.read_bytes() == b"x" * 100
    assert len(list(made.boot.ports.private.iterdir())) < 15


def test_damage_costs_a_warning_and_no_scrape(made: Stage) -> None:
    made.start_control()
    scheduler, _, _ = made.to_ready()
    scheduler.meter.inc("llmd_generation_tokens_total", 3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(made.boot.ports.control)
        stranger.send(b"\xc1 no message at all")
        wait_for(lambda: made.metric('llmd_wire_bad_frames_total{channel="control"}') == 1, "it is counted")
    made.kill_control()
    made.boot.ports.control_state.write_bytes(b"\x00damaged" * 100)
    made.start_control(incarnation=2)
    wait_for(lambda: made.status() and made.metric("llmd_generation_tokens_total") == 3, "the rest is there, from the next heartbeats")
    warnings = [line for line in made.log.read_text().splitlines() if '"warning"' in line and "damaged" in line]
    assert len(warnings) == 1 and "control.state" in warnings[0]


def test_the_catalogue_is_there_from_the_start_and_other_names_on_demand(made: Stage) -> None:
    observability = ObservabilityArgs(metrics=MetricsArgs(compat=("vllm",)))
    made.boot = msgspec.structs.replace(made.boot, args=msgspec.structs.replace(made.boot.args, observability=observability))
    made.boot.ports.boot.write_bytes(made.boot.dump())
    made.start_control()
    made.to_ready()
    made.http.post("/v1/resume")
    wait_for(lambda: made.metric('llmd_operations_total{verb="resume",result="succeeded"}'), "a new text")
    text = made.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wanted = {"llmd_build_info", "llmd_state", "llmd_process_up", "llmd_time_to_first_token_seconds", "llmd_request_duration_seconds", "llmd_kv_capacity_pages"}
    assert wanted <= families.keys()
    assert all(
        family.documentation == CATALOG[name if name in CATALOG else f"{name}_total"].help for name, family in families.items() if name.startswith("llmd_")
    )
    assert "vllm:num_requests_running" in families and not any(name.startswith("sglang:") for name in families)
