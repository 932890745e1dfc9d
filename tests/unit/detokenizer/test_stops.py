"""Stop strings against an oracle that sees the whole text at once, and every place in it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.detokenizer.stops import StopMatcher

ALPHABET = "ab\u00e9"

stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4)
texts = st.lists(st.text(ALPHABET, max_size=3), max_size=14)


def occurrences(chunks: list[str], stops: list[str], least: int = 0) -> list[tuple[int, int, str, int]]:
    """(start, end, stop string, chunks up to the one that completes it) of all that count, in the order in which they win."""
    text, ends = "".join(chunks), [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk))
    found = []
    for stop in stops:
        for at in range(len(text)):
            if text.startswith(stop, at):
                count = next(count for count, end in enumerate(ends) if end >= at + len(stop))
                found += [(at, at + len(stop), stop, count)] if count > least else []
    return sorted(found)


def undecided(text: str, before: int, stops: list[str]) -> list[int]:
    """The places before `before` at which a stop string may still come true."""
    return [at for at in range(min(before, len(text))) if any(len(stop) > len(text) - at and stop.startswith(text[at:]) for stop in stops)]


def play(chunks: list[str], stops: list[str], least: int = 0) -> tuple[str, str | None, int | None, int]:
    """(text, the winner, tokens up to its end, chunks that were looked at)."""
    matcher = StopMatcher(tuple(stops), least)
    out = ""
    for count, chunk in enumerate(chunks, 1):
        out += matcher.feed(chunk, count)
        if matcher.matched is not None:
            return out, matcher.matched, matcher.ended, count
    out += matcher.flush()
    return out, matcher.matched, matcher.ended, len(chunks)


@settings(max_examples=2000)
@given(texts, stop_lists, st.integers(0, 6))
def test_the_text_ends_before_the_first_stop_and_the_tokens_with_it(chunks: list[str], stops: list[str], least: int) -> None:
    out, matched, ended, _ = play(chunks, stops, least)
    found = occurrences(chunks, stops, least)
    if found:
        start, _, stop, count = found[0]
        assert (out, matched, ended) == ("".join(chunks)[:start], stop, count)
    else:
        assert (out, matched, ended) == ("".join(chunks), None, None)


@settings(max_examples=500)
@given(st.text(ALPHABET, max_size=30), stop_lists, st.lists(st.integers(0, 30), max_size=8))
def test_the_text_and_its_stop_are_the_same_however_the_text_is_cut_into_tokens(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert play(chunks, stops)[:2] == play(list(text), stops)[:2] == play([text], stops)[:2]


@settings(max_examples=1000)
@given(texts, stop_lists, st.integers(0, 6))
def test_no_more_waits_and_no_longer_than_what_may_still_come_true(chunks: list[str], stops: list[str], least: int) -> None:
    matcher, seen, sent = StopMatcher(tuple(stops), least), "", ""
    for count, chunk in enumerate(chunks, 1):
        seen, sent = seen + chunk, sent + matcher.feed(chunk, count)
        found = occurrences(chunks[:count], stops, least)
        end = found[0][0] if found else len(seen)
        open_ = undecided(seen, end, stops)
        assert (matcher.matched is not None) is (bool(found) and not open_)
        assert matcher.ended == (found[0][3] if found else None)
        assert sent == seen[: open_[0] if open_ else end]
        if matcher.matched is not None:
            return
        assert len(seen) - len(sent) < max(map(len, stops))


@pytest.mark.parametrize(
    ("chunks", "stops", "out", "matched"),
    [
        (["one <st", "op> two"], ["<stop>"], "one ", "<stop>"),
        (["one <st", "art>"], ["<stop>"], "one <start>", None),
        (["xab", "cd"], ["ab", "abc"], "x", "ab"),
        (["xabc"], ["ab", "abc"], "x", "ab"),
        (["abc", "d"], ["c", "bcd"], "a", "bcd"),
        (["abc", "x"], ["c", "bcd"], "ab", "c"),
        (["abc"], ["c", "bcd"], "ab", "c"),
        (["X", "a", "Y", "Z"], ["a", "XaYZ"], "", "XaYZ"),
        (["X", "a", "Y", "."], ["a", "XaYZ"], "X", "a"),
        (["aab"], ["ab"], "a", "ab"),
        (["zzzz-nev"], ["zzzz-never"], "zzzz-nev", None),
        (["\U0001f600\U0001f601"], ["\U0001f601"], "\U0001f600", "\U0001f601"),
    ],
)
def test_examples(chunks: list[str], stops: list[str], out: str, matched: str | None) -> None:
    assert play(chunks, stops)[:2] == (out, matched)


def test_what_waits_gives_way_to_what_starts_before_it_again_and_again() -> None:
    stops = ["d", "cde", "bcdef", "abcdefg"]
    assert play(list("-abcdefg-"), stops) == ("-", "abcdefg", 8, 8)
    assert play(list("-abcdef-"), stops) == ("-a", "bcdef", 7, 8)
    assert play(list("-abcde-"), stops) == ("-ab", "cde", 6, 7)
    assert play(list("-abcd-"), stops) == ("-abc", "d", 5, 6)
    assert play(list("-abcdef"), stops) == ("-a", "bcdef", 7, 7)
