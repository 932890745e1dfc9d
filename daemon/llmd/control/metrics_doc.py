"""docs/metrics.md, from the catalogue: `python -m llmd.control.metrics_doc ROOT`. A test keeps it current."""

from __future__ import annotations

import sys
from pathlib import Path

from llmd.control.catalog import CATALOG, Metric
from llmd.control.compat import COMPAT, metric_of

FILE = "docs/metrics.md"

_HEAD = """\
# Metrics

<!-- Written by `python -m llmd.control.metrics_doc .` from daemon/llmd/control/catalog.py. -->

`GET /metrics` of the data plane (and of the admin plane) has the metrics of all processes in Prometheus' text format. One scrape target is enough:
control keeps one registry, workers send it their totals with each heartbeat, and it adds up what they have done in all their lives. So a counter never
goes down when a process restarts, control itself included; it begins at 0 when llmd is started anew. A gauge is the sum over the processes that live
now. A value may be two heartbeats old (1 s by default): the worker's, and control's. If control is away, a frontend serves the last text, and
`llmd_metrics_age_seconds` grows. No label takes a value from a client.
`observability.metrics.require_key: true` asks for an API key.

```yaml
scrape_configs:
  - job_name: llmd
    static_configs: [{targets: ["127.0.0.1:8000"]}]
```

Questions in PromQL:

| question | |
|---|---|
| output tokens a second | `rate(llmd_generation_tokens_total[1m])` |
| 95th percentile of the time to the first token | `histogram_quantile(0.95, sum by (le) (rate(llmd_time_to_first_token_seconds_bucket[5m])))` |
| share of requests that end with an error | `sum(rate(llmd_requests_total{outcome="error"}[5m])) / sum(rate(llmd_requests_total[5m]))` |
| how full is the KV cache | `1 - llmd_kv_pages{state="free"} / ignoring(state) llmd_kv_capacity_pages` |
| hit rate of the prefix cache | `rate(llmd_prefix_cache_hit_tokens_total[5m]) / rate(llmd_prefix_cache_queried_tokens_total[5m])` |
| does anything crash or hang | `increase(llmd_process_restarts_total{reason!="reload",reason!="stop"}[1h]) > 0` |
| is it ready | `llmd_state{state="ready"} == 1` |

`outcome` of `llmd_requests_total`: `stop length tool_calls ok abort client_disconnect slow_client rejected invalid not_found unauthorized too_large
queue_timeout request_timeout error`. Each HTTP request to `/v1/*` and `/generate` is counted once; of several choices the worst counts.

"""


def text() -> str:
    """The page."""
    lines = ["| name | type | labels | |", "|---|---|---|---|", *(_row(name, metric) for name, metric in CATALOG.items()), ""]
    lines += [
        "## Names of other projects",
        "",
        "`observability.metrics.compat: [sglang, vllm]` adds these, each with the label `model_name`, so that dashboards",
    ]
    lines += ["made for those projects show something. What has no counterpart is left out.", ""]
    for project, aliases in COMPAT.items():
        lines += [f"### {project}", "", "| name | type | |", "|---|---|---|"]
        lines += [f"| `{alias.name}` | {metric_of(alias).kind} | {metric_of(alias).help} |" for alias in aliases]
        lines.append("")
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _row(name: str, metric: Metric) -> str:
    return f"| `{name}` | {metric.kind} | {' '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"


def main(argv: list[str]) -> int:
    """Write the file below the directory given."""
    (Path(argv[0] if argv else ".") / FILE).write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
