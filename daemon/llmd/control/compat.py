"""`observability.metrics.compat`: the quantities that exist, once more under the names that dashboards made for SGLang or vLLM look for.

What has no counterpart here is left out, never invented. Each series has the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from llmd.control.catalog import CATALOG, Kind, Metric
from llmd.control.exposition import escape
from llmd.observability.totals import series
from llmd.wire.messages import HistogramTotals

Values = Mapping[str, float]


class Alias(NamedTuple):
    """One foreign name. `source`: our own name where it is the same, or how to compute it from gauges and counters."""

    name: str
    source: str | Callable[[Values], float | None]
    kind: Kind = "gauge"
    help: str = ""


def _share(values: Values) -> float | None:
    """Of the KV pages, those that are not free."""
    total = values.get("llmd_kv_capacity_pages")
    return 1.0 - values.get('llmd_kv_pages{state="free"}', 0.0) / total if total else None


def _hit_rate(values: Values) -> float | None:
    queried = values.get("llmd_prefix_cache_queried_tokens_total", 0.0)
    return values.get("llmd_prefix_cache_hit_tokens_total", 0.0) / queried if queried else 0.0


def _requests(values: Values) -> float | None:
    return sum(value for key, value in values.items() if key.startswith("llmd_requests_total{"))


def _succeeded(values: Values) -> float | None:
    good = ('outcome="stop"', 'outcome="length"', 'outcome="tool_calls"')
    return sum(value for key, value in values.items() if key.startswith("llmd_requests_total{") and any(outcome in key for outcome in good))


COMPAT: dict[str, tuple[Alias, ...]] = {
    "sglang": (
        Alias("sglang:num_running_reqs", "llmd_requests_running"),
        Alias("sglang:num_queue_reqs", "llmd_requests_waiting"),
        Alias("sglang:token_usage", _share, help="Share of the KV cache that is not free."),
        Alias("sglang:cache_hit_rate", _hit_rate, help="Share of prompt tokens that the prefix cache knew, since the start."),
        Alias("sglang:num_requests_total", _requests, "counter", "HTTP requests."),
        Alias("sglang:prompt_tokens_total", "llmd_prompt_tokens_total"),
        Alias("sglang:generation_tokens_total", "llmd_generation_tokens_total"),
        Alias("sglang:time_to_first_token_seconds", "llmd_time_to_first_token_seconds"),
        Alias("sglang:inter_token_latency_seconds", "llmd_inter_token_latency_seconds"),
        Alias("sglang:e2e_request_latency_seconds", "llmd_request_duration_seconds"),
        Alias("sglang:queue_time_seconds", "llmd_queue_time_seconds"),
    ),
    "vllm": (
        Alias("vllm:num_requests_running", "llmd_requests_running"),
        Alias("vllm:num_requests_waiting", "llmd_requests_waiting"),
        Alias("vllm:kv_cache_usage_perc", _share, help="Share of the KV cache that is not free, 1 for all of it."),
        Alias("vllm:num_preemptions_total", "llmd_requests_retracted_total"),
        Alias("vllm:prompt_tokens_total", "llmd_prompt_tokens_total"),
        Alias("vllm:generation_tokens_total", "llmd_generation_tokens_total"),
        Alias("vllm:request_success_total", _succeeded, "counter", "HTTP requests that were answered to their end."),
        Alias("vllm:prefix_cache_queries_total", "llmd_prefix_cache_queried_tokens_total"),
        Alias("vllm:prefix_cache_hits_total", "llmd_prefix_cache_hit_tokens_total"),
        Alias("vllm:time_to_first_token_seconds", "llmd_time_to_first_token_seconds"),
        Alias("vllm:inter_token_latency_seconds", "llmd_inter_token_latency_seconds"),
        Alias("vllm:e2e_request_latency_seconds", "llmd_request_duration_seconds"),
        Alias("vllm:request_queue_time_seconds", "llmd_queue_time_seconds"),
    ),
}


def metric_of(alias: Alias) -> Metric:
    """Kind and help of a foreign name."""
    if isinstance(alias.source, str):
        own = CATALOG[alias.source]
        return Metric(own.kind, f"{own.help} The same as {alias.source}.", ("model_name",))
    return Metric(alias.kind, alias.help, ("model_name",))


def project(
    projects: tuple[str, ...], model: str, gauges: dict[str, float], counters: dict[str, float], histograms: dict[str, HistogramTotals]
) -> dict[str, Metric]:
    """Add the foreign names to the series; returns what they are."""
    values, labels = {**gauges, **counters}, (("model_name", escape(model)),)
    known: dict[str, Metric] = {}
    for alias in (alias for project in projects for alias in COMPAT[project]):
        metric = known[alias.name] = metric_of(alias)
        key = series(alias.name, labels)
        if metric.kind == "histogram":
            assert isinstance(alias.source, str)
            if alias.source in histograms:
                histograms[key] = histograms[alias.source]
            continue
        value = values.get(alias.source) if isinstance(alias.source, str) else alias.source(values)
        if value is not None:
            (gauges if metric.kind == "gauge" else counters)[key] = value
    return known
