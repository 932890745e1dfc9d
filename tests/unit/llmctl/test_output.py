"""Tables are aligned, YAML and JSON say the same, colours only on a terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmctl.output import Output, bar, duration, one_line, plan_costs, size, to_yaml

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="ascii"), max_size=6), inner, max_size=3),
    max_leaves=8,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_whatever_the_colour() -> None:
    for stream in (io.StringIO(), Terminal()):
        out = Output("table", True, stream)
        out.table(["NAME", "STATE", "N"], [["a", "ready", 1], ["long", "exited", 100]], frozenset({"N"}))
        plain = stream.getvalue()
        for code in ("\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[0m"):
            plain = plain.replace(code, "")
        assert plain.splitlines() == ["NAME  STATE     N", "a     ready     1", "long  exited  100"]
        assert ("\x1b" in stream.getvalue()) is isinstance(stream, Terminal)


def test_no_colour_if_refused() -> None:
    stream = Terminal()
    Output("table", False, stream).line(Output("table", False, stream).state("ready"))
    assert stream.getvalue() == "ready\n"


@given(JSON)
def test_yaml_reads_back(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == json.loads(json.dumps(value))


def test_yaml_has_no_lone_dash() -> None:
    assert to_yaml({"a": [{"b": 1, "c": [2]}, [3, 4]]}) == "a:\n  - b: 1\n    c:\n      - 2\n  - - 3\n    - 4"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert one_line("a\x1b[31mb\nc") == "a [31mb c"
    assert one_line(None) == "-"


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4s"), (12, "12s"), (250, "4m 10s"), (7500, "2h 5m"), (273600, "3d 4h"), (None, "-")])
def test_durations(seconds: Any, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "-"), (512, "512 B"), (98 * 2**20, "98 MiB"), (3 * 2**29, "1.5 GiB"), (None, "-")])
def test_sizes(count: Any, text: str) -> None:
    assert size(count) == text


def test_bars() -> None:
    assert bar(5, 10, 10) == "[#####-----]"
    assert bar(0, 0, 4) == "[----]"


def test_a_fact_that_there_is_not_is_left_out_in_colour_too() -> None:
    out = Output("table", True, stream := Terminal())
    out.facts([("degraded", out.paint("", "yellow")), ("model", out.paint("m", "red"))])
    assert len(stream.getvalue().splitlines()) == 1


def test_a_plan_that_drains_says_that_new_requests_are_refused_meanwhile() -> None:
    plan = {"processes_restarted": ["supervisor-0", "scheduler-0"], "downtime_s": 0.7, "drains_first_s": 30.0}
    assert plan_costs(plan)[-1] == "new requests refused: for up to 30s while it drains, then for about 0.7s while it starts anew"
    assert plan_costs({**plan, "drains_first_s": None})[-1] == "without an engine for about 0.7s"
