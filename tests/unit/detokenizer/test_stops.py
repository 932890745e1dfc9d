"""Stop strings against an oracle that sees the whole text at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.detokenizer.stops import StopMatcher

ALPHABET = "ab\u00e9"


def oracle(chunks: list[str], stops: list[str]) -> tuple[str, str | None, int]:
    """(text before the stop string that ends it, that stop string, number of chunks taken): the first chunk that completes any ends it."""
    text = ""
    for used, chunk in enumerate(chunks, 1):
        text += chunk
        found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
        if found is not None:
            return text[: found[0]], found[2], used
    return text, None, len(chunks)


def play(chunks: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(tuple(stops))
    out = []
    for chunk in chunks:
        out.append(matcher.feed(chunk))
        if matcher.matched is not None:
            return out, matcher.matched
    out.append(matcher.flush())
    return out, matcher.matched


stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=1000)
@given(st.lists(st.text(ALPHABET, max_size=5), max_size=12), stop_lists)
def test_the_first_token_that_completes_a_stop_ends_the_text_before_it(chunks: list[str], stops: list[str]) -> None:
    out, matched = play(chunks, stops)
    assert ("".join(out), matched, len(out) - (matched is None)) == oracle(chunks, stops)


@settings(max_examples=300)
@given(st.lists(st.text(ALPHABET, max_size=3), max_size=12), stop_lists, st.integers(0, 12))
def test_what_is_complete_before_a_text_may_end_is_text(chunks: list[str], stops: list[str], least: int) -> None:
    matcher, out, text = StopMatcher(tuple(stops)), "", ""
    for count, chunk in enumerate(chunks, 1):
        out += matcher.feed(chunk, may_end=count > least)
        before, text = len(text), text + chunk
        ends = [at + len(stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
        assert (matcher.matched is not None) is (count > least and any(end > before for end in ends))
        if matcher.matched is not None:
            assert text.startswith(out + matcher.matched)
            return
    assert out + matcher.flush() == text


@settings(max_examples=500)
@given(st.lists(st.text(ALPHABET, max_size=3), max_size=12), stop_lists)
def test_no_more_is_held_back_than_may_be_the_start_of_a_stop(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    seen = sent = ""
    for chunk in chunks:
        seen, sent = seen + chunk, sent + matcher.feed(chunk)
        if matcher.matched is not None:
            return
        held = seen[len(sent) :]
        assert len(held) < max(map(len, stops))
        assert held == "" or any(stop.startswith(held) for stop in stops) or any(stop in held for stop in stops)


@pytest.mark.parametrize(
    ("chunks", "stops", "out", "matched"),
    [
        (["one <st", "op> two"], ["<stop>"], "one ", "<stop>"),
        (["one <st", "art>"], ["<stop>"], "one <start>", None),
        (["xab", "cd"], ["ab", "abc"], "x", "ab"),
        (["xabc"], ["ab", "abc"], "x", "ab"),
        (["abc", "d"], ["c", "bcd"], "ab", "c"),
        (["ab", "cd"], ["c", "bcd"], "a", "bcd"),
        (["ab", "cx"], ["c", "bcd"], "ab", "c"),
        (["X", "a", "Y"], ["a", "XaYZ"], "X", "a"),
        (["aab"], ["ab"], "a", "ab"),
        (["zzzz-nev"], ["zzzz-never"], "zzzz-nev", None),
        (["\U0001f600\U0001f601"], ["\U0001f601"], "\U0001f600", "\U0001f601"),
    ],
)
def test_examples(chunks: list[str], stops: list[str], out: str, matched: str | None) -> None:
    pieces, found = play(chunks, stops)
    assert ("".join(pieces), found) == (out, matched)
