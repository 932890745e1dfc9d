"""Names, types and help texts of the metrics; the order here is the order of the exposition."""

from __future__ import annotations

from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

CATALOG: dict[str, tuple[Kind, str]] = {
    "llmd_build_info": ("gauge", "Version of llmd, always 1."),
    "llmd_model_info": ("gauge", "The model that is served, always 1."),
    "llmd_weights_info": ("gauge", "Version of the weights that are served, always 1."),
    "llmd_state": ("gauge", "1 for the state of the daemon, 0 for all others."),
    "llmd_engine_epoch": ("gauge", "Incarnation of the engine."),
    "llmd_process_up": ("gauge", "Whether the process is running."),
    "llmd_process_restarts_total": ("counter", "Restarts of processes, by why the one before ended."),
    "llmd_process_heartbeat_timestamp_seconds": ("gauge", "Unix time of the last heartbeat."),
    "llmd_process_resident_memory_bytes": ("gauge", "Resident memory."),
    "llmd_process_cpu_seconds_total": ("counter", "CPU time, user and system, over all incarnations."),
    "llmd_watchdog_kills_total": ("counter", "Processes killed because they hung."),
    "llmd_requests_total": ("counter", "HTTP requests, each counted once, by outcome."),
    "llmd_requests_running": ("gauge", "Requests in the running batch."),
    "llmd_requests_waiting": ("gauge", "Requests in the queue."),
    "llmd_requests_recovered_total": ("counter", "Requests that went on after a crash."),
    "llmd_requests_isolated_total": ("counter", "Requests refused because engines have died of them."),
    "llmd_requests_held": ("gauge", "Requests that arrived while the engine was away, and wait for it."),
    "llmd_requests_retracted_total": ("counter", "Requests put back into the queue because KV pages ran out."),
    "llmd_requests_preempted_total": ("counter", "Requests put back into the queue for a more urgent one; also counted as retracted."),
    "llmd_kv_accounting_errors_total": ("counter", "Times the KV pages did not add up while idle, and all were freed."),
    "llmd_prompt_tokens_total": ("counter", "Prompt tokens of answered requests."),
    "llmd_generation_tokens_total": ("counter", "Generated tokens that were delivered."),
    "llmd_kv_pages": ("gauge", "KV pages by state; the states add up to the capacity."),
    "llmd_kv_capacity_pages": ("gauge", "KV pages in total."),
    "llmd_prefix_cache_queried_tokens_total": ("counter", "Prompt tokens looked up in the prefix cache."),
    "llmd_prefix_cache_hit_tokens_total": ("counter", "Prompt tokens found in the prefix cache."),
    "llmd_time_to_first_token_seconds": ("histogram", "From the request's arrival to its first token."),
    "llmd_inter_token_latency_seconds": ("histogram", "Between two tokens of one request."),
    "llmd_request_duration_seconds": ("histogram", "From the request's arrival to its end."),
    "llmd_queue_time_seconds": ("histogram", "From the request's arrival to its first step."),
    "llmd_scheduler_step_seconds": ("histogram", "One step of the scheduler, by phase."),
    "llmd_operations_total": ("counter", "Administrative operations by result."),
    "llmd_wire_bad_frames_total": ("counter", "Frames that were dropped because they did not decode."),
    "llmd_scrape_duration_seconds": ("gauge", "Time that control took to put this text together."),
}

#: Counters without labels, there from the start with the value 0.
ZERO_COUNTERS = tuple(
    f"llmd_{name}_total"
    for name in ("requests_recovered", "requests_retracted", "prompt_tokens", "generation_tokens", "prefix_cache_queried_tokens", "prefix_cache_hit_tokens")
)
