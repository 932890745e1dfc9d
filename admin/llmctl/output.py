"""How answers are written: aligned tables for people, JSON or YAML for programs. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}
#: States of the daemon and of processes -> colour.
STATES = {
    "ready": "green",
    "busy": "green",
    "succeeded": "green",
    **dict.fromkeys(
        ("starting", "loading", "warming", "recovering", "reloading", "draining", "paused", "asleep", "stopping", "blocked", "running", "pending"), "yellow"
    ),
    **dict.fromkeys(("stopped", "died", "failed", "stalled", "backoff", "exited", "partial", "rolled_back"), "red"),
}


class Output:
    """Writes to `stream`; colours only where they were not refused and somebody is looking."""

    def __init__(self, form: str, colour: bool, stream: TextIO | None = None) -> None:
        self.form = form
        self._stream = stream or sys.stdout
        self.colour = colour and self._stream.isatty()

    @property
    def is_table(self) -> bool:
        return self.form in ("table", "wide")

    @property
    def is_wide(self) -> bool:
        return self.form == "wide"

    def data(self, value: Any) -> None:
        """A whole answer as JSON or YAML."""
        self.line(json.dumps(value, indent=2, ensure_ascii=False) if self.form != "yaml" else to_yaml(value))

    def clear(self) -> None:
        """A clean screen, where there is one; else an empty line between two answers."""
        self._stream.write("\x1b[H\x1b[2J" if self._stream.isatty() else "\n")

    def flush(self) -> None:
        """Let it be seen now."""
        self._stream.flush()

    def line(self, text: str = "") -> None:
        self._stream.write(text + "\n")

    def paint(self, text: str, colour: str | None) -> str:
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if self.colour and colour and text else text

    def state(self, state: str, width: int = 0) -> str:
        """A state in its colour, padded outside of the colour."""
        return self.paint(state, STATES.get(state)) + " " * max(0, width - len(state))

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """`name  value` lines; rows without a value are left out."""
        shown = [(name, value) for name, value in rows if value]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.line(f"{self.paint(f'{name:<{width}}', 'dim')}  {value}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: frozenset[str] = frozenset()) -> None:
        """Aligned columns; those in `right` are numbers. The column STATE is coloured."""
        cells = [[one_line(cell) for cell in row] for row in rows]
        widths = [max([len(name), *(len(row[n]) for row in cells)]) for n, name in enumerate(columns)]
        heads = [name.rjust(width) if name in right else name.ljust(width) for name, width in zip(columns, widths, strict=True)]
        self.line(self.paint("  ".join(heads).rstrip(), "bold"))
        for row in cells:
            parts = []
            for name, cell, width in zip(columns, row, widths, strict=True):
                parts.append(self.state(cell, width) if name == "STATE" else cell.rjust(width) if name in right else cell.ljust(width))
            self.line("  ".join(parts).rstrip())


def one_line(value: Any) -> str:
    """A cell: no control characters, `-` for nothing."""
    text = "-" if value is None or value == "" else str(value)
    return "".join(char if char.isprintable() else " " for char in text)


def to_yaml(value: Any, indent: str = "") -> str:
    """JSON data as YAML blocks."""
    if isinstance(value, Mapping) and value:
        return "\n".join(f"{indent}{_key(str(key))}:{_child(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        # An item begins on the line of its dash.
        return "\n".join(f"{indent}- {to_yaml(item, indent + '  ')[len(indent) + 2 :]}" for item in value)
    return indent + _scalar(value)


def _child(value: Any, indent: str) -> str:
    if isinstance(value, Mapping | list) and value:
        return "\n" + to_yaml(value, indent + "  ")
    return " " + _scalar(value)


def _key(name: str) -> str:
    misread = name.lower() in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
    return name if name.isascii() and name.isidentifier() and not misread else _scalar(name)


def _scalar(value: Any) -> str:
    """As JSON, but for what YAML 1.1 reads otherwise: characters that do not print, floats without a point."""
    if isinstance(value, str):
        return '"' + "".join(f"\\{char}" if char in '\\"' else char if char.isprintable() else f"\\U{ord(char):08x}" for char in value) + '"'
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def duration(seconds: Any) -> str:
    """`3d 4h`, `2h 5m`, `4m 10s`, `12s`, `0.4s`."""
    if not isinstance(seconds, int | float):
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part}{small}"
    return f"{whole}s"


def counted(number: int, noun: str, many: str = "") -> str:
    """`1 request`, `2 requests`; `many` is a plural that takes more than an s."""
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def size(count: Any) -> str:
    """`94 MiB`."""
    if not isinstance(count, int | float) or count <= 0:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount >= 10 or unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(seconds: Any) -> str:
    """Unix time in UTC, as the log and the audit write it: `2026-01-01T00:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if isinstance(seconds, int | float) else "-"


def plan_steps(plan: Mapping[str, Any]) -> list[str]:
    """What a plan does, one after the other."""
    lines = [f"{number}. {one_line(step)}" for number, step in enumerate(plan.get("steps") or [], 1)]
    return lines + [f"   {change['key']}: {change['before']} -> {change['after']}  [{change['reload']}]" for change in plan.get("changes") or []]


def plan_costs(plan: Mapping[str, Any]) -> list[str]:
    """What a plan costs; empty: nothing."""
    costs = []
    for name, noun in (("requests_aborted", "aborted"), ("requests_held", "held"), ("requests_finished", "waited for")):
        if plan.get(name):
            costs.append(f"{counted(plan[name], 'request')} {noun}")
    for name, noun in (("tokens_dropped", "generated token"), ("pages_forgotten", "cached page")):
        if plan.get(name):
            costs.append(f"{counted(plan[name], noun)} dropped")
    for name, word in (("processes_restarted", "restarted"), ("processes_stopped", "stopped")):
        if plan.get(name):
            costs.append(f"{word}: {', '.join(plan[name])}")
    downtime = plan.get("downtime_s")
    if plan.get("processes_restarted"):
        time_away = "an unknown time" if downtime is None else f"about {duration(downtime)}"
        drain = plan.get("drains_first_s")
        if drain is not None:
            costs.append(f"new requests refused: for up to {duration(drain)} while it drains, then for {time_away} while it starts anew")
        else:
            costs.append(f"without an engine for {time_away}")
    return costs


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """A plan for people: what is done, and what it costs."""
    lines = plan_steps(plan)
    if plan.get("refused"):
        return [*lines, one_line(plan["refused"]["message"]), one_line(plan["refused"]["hint"])]
    return [*lines, f"cost: {'; '.join(plan_costs(plan)) or 'none'}"]


def bar(used: float, total: float, width: int = 20) -> str:
    """`[####------]`."""
    filled = round(width * used / total) if total > 0 else 0
    return f"[{'#' * filled}{'-' * (width - filled)}]"
