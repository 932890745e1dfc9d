"""The pools' accounting under anything that a scheduler may do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.memory.pools import AccountingError, ReqToTokenPool, TokenToKVPoolAllocator


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 40), page_size=st.sampled_from([1, 16]), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_free_and_active_pages_add_up_and_no_page_is_given_twice(total: int, page_size: int, steps: list[tuple[bool, int]]) -> None:
    allocator = TokenToKVPoolAllocator(total, page_size)
    holders: list[list[int]] = []
    for take, number in steps:
        if take:
            free = allocator.pages_free
            pages = allocator.alloc(number)
            assert (pages is None) == (number > free)
            if pages is not None:
                assert len(pages) == number
                holders.append(pages)
        elif holders:
            allocator.free(holders.pop(number % len(holders)))
        held = [page for pages in holders for page in pages]
        assert allocator.check(held) is None
        assert len(set(held)) == len(held) and 0 not in held
        assert allocator.pages_active == len(held) == allocator.pages_total - allocator.pages_free
    assert allocator.num_slots == (total + 1) * page_size


def test_a_page_freed_twice_is_told_and_nothing_changes() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)
    pages = allocator.alloc(2)
    assert pages is not None
    allocator.free(pages[:1])
    for bad in (pages, [pages[1], pages[1]], [0], [5]):
        with pytest.raises(AccountingError):
            allocator.free(bad)
    assert allocator.check([pages[1]]) is None


def test_a_leak_is_seen_and_healed() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)
    kept, lost = allocator.alloc(1), allocator.alloc(2)
    assert kept is not None and lost is not None
    assert "3 pages are taken" in (allocator.check(kept) or "")
    allocator.rebuild(kept)
    assert allocator.check(kept) is None and allocator.pages_free == 3


def test_pages_for_counts_begun_pages() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 15, 16, 17, 31, 32, 33)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_rows_are_given_once_and_row_zero_never() -> None:
    pool = ReqToTokenPool(3, 8)
    assert pool.req_to_token.shape == (4, 8) and pool.req_to_token.dtype == "int32"
    rows = [pool.alloc() for _ in range(4)]
    assert sorted(row for row in rows if row) == [1, 2, 3] and rows[3] is None
    pool.free(2)
    with pytest.raises(AccountingError):
        pool.free(2)
    assert pool.available == 1 and pool.active == 2
    pool.rebuild([1])
    assert pool.available == 2 and {pool.alloc(), pool.alloc()} == {2, 3}
