"""The memory of which pages is taken ahead of use: never one that a token may lie in, never more than is meant to be."""

from __future__ import annotations

import pytest

from llmd.memory.pools import TokenToKVPoolAllocator
from llmd.scheduler import ahead
from llmd.scheduler.ahead import Ahead

PAGE = 1 << 20


def all_of(made: Ahead, taken: list[int]) -> list[int]:
    """The pages that are taken until there is enough."""
    taken.clear()
    while made.take():
        assert len(taken) < 10_000
    return list(taken)


def make(pages: TokenToKVPoolAllocator, page_bytes: int = PAGE) -> tuple[Ahead, list[int]]:
    taken: list[int] = []
    return Ahead(pages, page_bytes, lambda begin, end: taken.extend(range(begin, end))), taken


def test_pages_behind_the_highest_used_one_are_taken_once_each() -> None:
    pages = TokenToKVPoolAllocator(2000, 16)
    made, taken = make(pages)
    assert all_of(made, taken) == list(range(1, 513))
    first = pages.alloc(340)
    assert first == list(range(1, 341))
    assert all_of(made, taken) == []
    pages.alloc(60)
    assert all_of(made, taken) == list(range(513, 601)), "half as many again as have been used"
    pages.free(first)
    pages.alloc(340)
    assert all_of(made, taken) == [], "they are there, whoever has them now"
    pages.alloc(600)
    assert all_of(made, taken) == list(range(1001, 1501)), "those up to 1,000 have come by their own use"
    pages.alloc(500)
    assert all_of(made, taken) == list(range(1501, 2001))
    pages.alloc(pages.pages_free)
    assert all_of(made, taken) == []


def test_no_page_is_taken_that_the_pool_does_not_have() -> None:
    pages = TokenToKVPoolAllocator(100, 16)
    made, taken = make(pages)
    assert all_of(made, taken) == list(range(1, 101))


def test_a_rebuilt_pool_is_as_used_as_before() -> None:
    pages = TokenToKVPoolAllocator(2000, 16)
    made, taken = make(pages)
    pages.alloc(1200)
    pages.rebuild([3])
    assert all_of(made, taken) == list(range(1201, 1801))


@pytest.mark.parametrize(("page_bytes", "each"), [(PAGE // 4, 8), (PAGE, 2), (8 * PAGE, 1), (ahead.FIRST_BYTES * 2, 1)])
def test_a_piece_is_small_and_never_nothing(page_bytes: int, each: int) -> None:
    made, taken = make(TokenToKVPoolAllocator(5000, 16), page_bytes)
    made.take()
    assert taken == list(range(1, each + 1))
