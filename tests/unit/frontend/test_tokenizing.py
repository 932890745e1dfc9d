"""Of many texts, the first that is too long is the last that costs anything; long texts of /tokenize keep nobody waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from llmd.errors import RequestError

from .test_app import make_runtime


class Words:
    """A token for each word; it cannot be told from a text's length how many there are."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: set[str] = set()

    def least_tokens(self, text: str) -> int:
        return 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.seen.append(text[:1])
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        return [1] * (text.count(" ") + 1)

    def token_text(self, id: int) -> str:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        return "x"


def manager(tmp_path: Path) -> tuple[Any, Words]:
    made, words = make_runtime(tmp_path).manager, Words()
    made.equip(words, None)  # type: ignore[arg-type]
    return made, words


async def test_the_first_text_that_is_too_long_is_refused_before_the_others_are_looked_at(tmp_path: Path) -> None:
    made, words = manager(tmp_path)
    long = " ".join("x" * 100_000)
    texts = [("input[0]", "a"), ("input[1]", "b" + long), *((f"input[{i}]", "c" + long) for i in range(2, 250))]
    with pytest.raises(RequestError) as caught:
        await made.encode_all(texts)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    assert words.seen == ["a", "b"]
    with pytest.raises(RequestError) as caught:
        await made.encode_all([("input[0]", "a" + long), ("input[1]", [1] * 1_000_000)])
    assert (caught.value.param, len(words.seen)) == ("input[1]", 2)
    made.executor.shutdown()


async def test_texts_of_any_length_have_a_thread_of_their_own(tmp_path: Path) -> None:
    made, words = manager(tmp_path)
    ids = await made.encode(" ".join("x" * 100_000), add_special_tokens=True, bounded=False)
    assert len(ids) == 100_000
    assert (await made.token_texts([ids]))[0][-1] == "x"
    assert words.threads == {"tokenize-any"}
    made.aside.shutdown()
