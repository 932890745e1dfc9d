"""Names, types and help texts of the metrics; the order here is the order of the exposition."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One family of series."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """No label takes a client's value."""


CATALOG: dict[str, Metric] = {
    "llmd_build_info": Metric("gauge", "Version of llmd, always 1.", ("version",)),
    "llmd_model_info": Metric("gauge", "The model that is served, always 1.", ("model", "dtype", "quantization")),
    "llmd_weights_info": Metric("gauge", "Version of the weights that are served, always 1.", ("version",)),
    "llmd_state": Metric("gauge", "1 for the state of the daemon, 0 for all others.", ("state",)),
    "llmd_engine_epoch": Metric("gauge", "Incarnation of the engine."),
    "llmd_process_up": Metric("gauge", "Whether the process is running.", ("role", "rank")),
    "llmd_process_restarts_total": Metric("counter", "Starts after the first, by why the process before ended; reload and stop: as asked.", ("role", "reason")),
    "llmd_process_heartbeat_timestamp_seconds": Metric("gauge", "Unix time of the last heartbeat.", ("role", "rank")),
    "llmd_process_resident_memory_bytes": Metric("gauge", "Resident memory.", ("role", "rank")),
    "llmd_process_cpu_seconds_total": Metric("counter", "CPU time, user and system, over all incarnations.", ("role", "rank")),
    "llmd_watchdog_kills_total": Metric("counter", "Processes killed because they hung.", ("role",)),
    "llmd_requests_total": Metric("counter", "HTTP requests, each counted once, by outcome.", ("endpoint", "outcome")),
    "llmd_requests_running": Metric("gauge", "Requests in the running batch."),
    "llmd_requests_waiting": Metric("gauge", "Requests in the queue."),
    "llmd_requests_recovered_total": Metric("counter", "Requests that went on after a crash."),
    "llmd_requests_isolated_total": Metric("counter", "Requests refused because engines have died of them."),
    "llmd_requests_held": Metric("gauge", "Requests that arrived while the engine was away, and wait for it."),
    "llmd_requests_retracted_total": Metric("counter", "Requests put back into the queue because KV pages ran out."),
    "llmd_requests_preempted_total": Metric("counter", "Requests put back into the queue for a more urgent one; also counted as retracted."),
    "llmd_kv_accounting_errors_total": Metric("counter", "Times the KV pages did not add up while idle, and all were freed."),
    "llmd_prompt_tokens_total": Metric("counter", "Prompt tokens of answered requests."),
    "llmd_generation_tokens_total": Metric("counter", "Generated tokens that were delivered."),
    "llmd_kv_pages": Metric("gauge", "KV pages by state; the states add up to the capacity.", ("state",)),
    "llmd_kv_capacity_pages": Metric("gauge", "KV pages in total."),
    "llmd_prefix_cache_queried_tokens_total": Metric("counter", "Prompt tokens looked up in the prefix cache."),
    "llmd_prefix_cache_hit_tokens_total": Metric("counter", "Prompt tokens found in the prefix cache."),
    "llmd_time_to_first_token_seconds": Metric("histogram", "From the request's arrival to its first token."),
    "llmd_inter_token_latency_seconds": Metric("histogram", "Between two tokens of one request."),
    "llmd_request_duration_seconds": Metric("histogram", "From the request's arrival to its end."),
    "llmd_queue_time_seconds": Metric("histogram", "From the request's arrival to its first step."),
    "llmd_scheduler_step_seconds": Metric("histogram", "One step of the scheduler, by phase.", ("phase",)),
    "llmd_operations_total": Metric("counter", "Administrative operations by result.", ("verb", "result")),
    "llmd_wire_bad_frames_total": Metric("counter", "Frames that were dropped because they did not decode.", ("channel",)),
    "llmd_wire_stale_messages_total": Metric("counter", "Messages of another epoch of the engine, which were dropped.", ("channel",)),
    "llmd_requests_duplicate_total": Metric("counter", "Requests that came to the scheduler twice, and were taken once."),
    "llmd_health_generate_total": Metric("counter", "Probes of /health_generate by result.", ("result",)),
    "llmd_detokenizer_states": Metric("gauge", "Requests that the detokenizer has text of."),
    "llmd_detokenizer_dropped_backlogs_total": Metric("counter", "Outputs that no frontend took, and that were dropped."),
    "llmd_metrics_age_seconds": Metric("gauge", "Age of this text, where a frontend serves it; it grows while control is away."),
    "llmd_scrape_duration_seconds": Metric("gauge", "Time that control took to put this text together."),
}

#: Counters without labels, there from the start with the value 0.
ZERO_COUNTERS = tuple(
    f"llmd_{name}_total"
    for name in ("requests_recovered", "requests_retracted", "prompt_tokens", "generation_tokens", "prefix_cache_queried_tokens", "prefix_cache_hit_tokens")
)

#: Histograms without labels, there from the start with nothing in them.
ZERO_HISTOGRAMS = (
    "llmd_time_to_first_token_seconds",
    "llmd_inter_token_latency_seconds",
    "llmd_request_duration_seconds",
    "llmd_queue_time_seconds",
)
