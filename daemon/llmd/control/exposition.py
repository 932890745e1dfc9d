"""Prometheus text format 0.0.4 from flat series: `name{label="value"}` -> value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from llmd.control.catalog import CATALOG, Kind, Metric
from llmd.wire.messages import HistogramTotals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def escape(value: str) -> str:
    """A label's value. Characters that a series key must not hold are escaped or replaced."""
    return value.replace("\\", "/").replace('"', "'").replace("\n", " ")


def render(
    gauges: Mapping[str, float], counters: Mapping[str, float], histograms: Mapping[str, HistogramTotals], more: Mapping[str, Metric] | None = None
) -> str:
    """The whole text. A name that occurs with two types keeps the first one. `more`: what names are beside those of the catalogue."""
    described = {**CATALOG, **(more or {})}
    families: dict[str, tuple[Kind, list[str]]] = {}
    for kind, flat in (("gauge", gauges), ("counter", counters)):
        for key, value in flat.items():
            _lines(families, key, kind).append(f"{key} {_number(value)}")
    for key, histogram in histograms.items():
        _lines(families, key, "histogram").extend(_histogram(key, histogram))
    known = [name for name in described if name in families]
    parts = []
    for name in known + sorted(families.keys() - described.keys()):
        kind, lines = families[name]
        parts.append(f"# HELP {name} {described[name].help if name in described else name}\n# TYPE {name} {kind}\n")
        parts.extend(f"{line}\n" for line in lines)
    return "".join(parts)


def _lines(families: dict[str, tuple[Kind, list[str]]], key: str, kind: str) -> list[str]:
    name = key.partition("{")[0]
    wanted: Kind = "gauge" if kind == "gauge" else "counter" if kind == "counter" else "histogram"
    entry = families.setdefault(name, (wanted, []))
    return entry[1] if entry[0] == wanted else []


@lru_cache(maxsize=256)
def _histogram(key: str, histogram: HistogramTotals) -> tuple[str, ...]:
    """Most of the text, and most of the time nothing of it is new."""
    name, _, rest = key.partition("{")
    labels = rest.removesuffix("}")
    prefix = f"{labels}," if labels else ""
    suffix = f"{{{labels}}}" if labels else ""
    edges = [*(_number(bound) for bound in histogram.bounds), "+Inf"]
    lines = [f'{name}_bucket{{{prefix}le="{edge}"}} {count}' for edge, count in zip(edges, histogram.counts, strict=True)]
    return (*lines, f"{name}_sum{suffix} {_number(histogram.sum)}", f"{name}_count{suffix} {histogram.counts[-1]}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
