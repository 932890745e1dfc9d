"""After a detokenizer was lost: everybody's output is asked for, then suspects one by one, and who ends a detokenizer alone is condemned."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from llmd.frontend import replays
from llmd.frontend.replays import Replays

ALL = {"a": ["a"], "b": ["b-0", "b-1"], "c": ["c"]}


@pytest.fixture
async def line() -> AsyncIterator[tuple[Replays, list[str]]]:
    asked: list[str] = []
    made = Replays(asked.append, lambda: 60.0)
    yield made, asked
    made.forget()


async def test_who_ends_a_detokenizer_alone_is_condemned_and_the_others_go_on(line: tuple[Replays, list[str]]) -> None:
    made, asked = line
    assert made.lost(ALL) is None
    assert asked == ["a", "b", "c"]
    made.heard("a", "a")
    asked.clear()
    assert made.lost(ALL) is None, "of two that were asked for, nobody knows which one it was"
    assert asked == ["a", "b"]
    assert made.waits("c")
    assert not made.waits("b")
    made.heard("b", "b-0")
    assert made.waits("c"), "one of its choices has not been heard of"
    made.heard("b", "b-1")
    assert asked == ["a", "b", "c"]
    asked.clear()
    assert made.lost(ALL) == "c"
    assert asked == ["b", "a"]


async def test_one_that_is_over_lets_the_next_one_try(line: tuple[Replays, list[str]]) -> None:
    made, asked = line
    made.lost(ALL)
    asked.clear()
    made.lost(ALL)
    assert asked == ["a"]
    made.over("b")
    made.over("a")
    assert asked == ["a", "c"]
    made.heard("c", "c")
    assert made.lost({"d": ["d"]}) is None


async def test_of_many_suspects_some_are_tried_alone_and_the_rest_together(line: tuple[Replays, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_ALONE", 1)
    made, asked = line
    made.lost(ALL)
    asked.clear()
    made.lost(ALL)
    assert asked == ["a"]
    made.heard("a", "a")
    assert asked == ["a", "b", "c"]


async def test_what_was_asked_for_long_ago_has_no_part_in_it(line: tuple[Replays, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SUSPECT_S", 0.0)
    made, asked = line
    made.lost(ALL)
    asked.clear()
    assert made.lost(ALL) is None
    assert asked == ["a", "b", "c"]


async def test_another_engine_begins_anew(line: tuple[Replays, list[str]]) -> None:
    made, asked = line
    made.lost(ALL)
    made.lost(ALL)
    made.forget()
    assert not any(made.waits(rid) for rid in ALL)
    asked.clear()
    assert made.lost(ALL) is None
    assert asked == ["a", "b", "c"]
