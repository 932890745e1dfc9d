"""The prefix tree against a plain dictionary: prefix -> page, whatever is inserted, matched, locked, evicted or flushed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.memory.pools import TokenToKVPoolAllocator
from llmd.memory.radix_cache import Eviction, Namespace, Node, RadixCache

NAMESPACES: list[Namespace] = [("", "v1"), ("", "v2"), ("adapter", "v1")]
TOTAL = 48

# Few tokens and repeated blocks make sequences that share prefixes of many depths and part inside pages.
blocks = st.lists(st.sampled_from([0, 1]), max_size=7)
operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "match", "lock", "unlock", "evict", "discard", "flush"]),
        st.integers(0, 2),
        blocks,
        st.integers(0, 12),
    ),
    max_size=60,
)


def key_of(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def tokens_of(block_ids: list[int], page_size: int, tail: int) -> list[int]:
    """Blocks of a page each, two kinds that differ in their last token only; then a tail shorter than a page."""
    return [token for block in block_ids for token in [7] * (page_size - 1) + [block]] + [7] * (tail % page_size)


@dataclass
class Model:
    """The tree and what it ought to know."""

    page_size: int
    eviction: Eviction
    known: dict[tuple[Namespace, bytes], int] = field(default_factory=dict)
    locks: list[tuple[Node, set[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = RadixCache(self.page_size, self.eviction)
        self.pool = TokenToKVPoolAllocator(TOTAL, self.page_size)

    def prefix(self, namespace: Namespace, key: bytes) -> list[int]:
        """Pages of the longest known prefix, by looking them all up."""
        pages = []
        size = self.page_size * 4
        for end in range(size, len(key) + 1, size):
            page = self.known.get((namespace, key[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def locked(self) -> set[int]:
        return set().union(*(pages for _, pages in self.locks))

    def forget(self, freed: list[int]) -> None:
        assert len(set(freed)) == len(freed) and not set(freed) & self.locked()
        gone = [prefix for prefix, page in self.known.items() if page in set(freed)]
        assert len(gone) == len(freed)
        for prefix in gone:
            del self.known[prefix]
        for namespace, key in self.known:
            assert len(self.prefix(namespace, key)) * self.page_size * 4 == len(key), "the start of a known sequence is gone"
        self.pool.free(freed)

    def insert(self, namespace: Namespace, key: bytes) -> None:
        size = self.page_size * 4
        count = len(key) // size
        pages = self.pool.alloc(count)
        if pages is None:
            self.forget(self.tree.evict(count - self.pool.pages_free))
            pages = self.pool.alloc(count)
        if pages is None:
            return
        known = self.tree.insert(namespace, key, pages)
        assert known.pages == self.prefix(namespace, key)
        self.pool.free(pages[: len(known.pages)])  # duplicates
        for index in range(len(known.pages), count):
            self.known[namespace, key[: (index + 1) * size]] = pages[index]

    def play(self, what: str, namespace: Namespace, key: bytes, number: int) -> None:
        if what == "insert":
            self.insert(namespace, key)
        elif what in ("match", "lock"):
            expected = self.prefix(namespace, key)
            assert self.tree.peek(namespace, key) == (len(expected), len(set(expected) - self.locked()))
            match = self.tree.match(namespace, key)
            assert match.pages == expected
            if what == "lock":
                self.tree.lock(match.node)
                self.locks.append((match.node, set(expected)))
        elif what == "unlock" and self.locks:
            self.tree.unlock(self.locks.pop(number % len(self.locks))[0])
        elif what == "evict":
            possible = self.tree.pages_cached
            freed = self.tree.evict(number)
            assert len(freed) == min(number, possible)
            self.forget(freed)
        elif what == "discard":
            self.forget(self.tree.discard(self.tree.match(namespace, key).node))
        elif what == "flush":
            self.forget(self.tree.flush())
            assert set(self.known.values()) == self.locked()

    def check(self) -> None:
        assert self.tree.check() is None
        assert self.tree.pages_locked == len(self.locked())
        assert self.tree.pages_cached >= 0
        assert self.pool.pages_free + self.tree.pages_cached + self.tree.pages_locked == TOTAL
        assert self.pool.check(list(self.known.values())) is None
        assert sorted(page for node in self.tree.nodes() for page in node.pages) == sorted(self.known.values())


@settings(max_examples=300, deadline=None)
@given(operations=operations, page_size=st.sampled_from([1, 16, 64]), eviction=st.sampled_from(["lru", "lfu", "fifo"]))
def test_the_tree_knows_what_a_dictionary_knows_and_the_books_balance(operations: list[tuple[Any, ...]], page_size: int, eviction: Eviction) -> None:
    model = Model(page_size, eviction)
    for what, namespace, block_ids, number in operations:
        model.play(what, NAMESPACES[namespace], key_of(tokens_of(block_ids, page_size, number)), number)
        model.check()
    for node, _ in model.locks:
        model.tree.unlock(node)
    model.locks.clear()
    model.forget(model.tree.flush())
    assert model.pool.pages_free == TOTAL and not list(model.tree.nodes())


@pytest.mark.parametrize(("eviction", "order"), [("lru", [3, 2, 1]), ("lfu", [1, 3, 2]), ("fifo", [1, 2, 3])])
def test_what_goes_first(eviction: Eviction, order: list[int]) -> None:
    tree = RadixCache(1, eviction)
    for token in (1, 2, 3):
        tree.insert(("", ""), key_of([token]), [token])
    for token in (3, 3, 2, 2, 2, 1):
        tree.match(("", ""), key_of([token]))
    assert [tree.evict(1)[0] for _ in range(3)] == order


def test_a_sequence_goes_from_its_end_and_its_locked_start_stays() -> None:
    tree = RadixCache(1)
    tree.insert(("", ""), key_of([1, 2, 3, 4]), [1, 2, 3, 4])
    tree.lock(tree.match(("", ""), key_of([1, 2, 9])).node)
    assert tree.evict(1) == [4]
    assert tree.evict(9) == [3]
    assert (tree.pages_locked, tree.pages_cached) == (2, 0)


def test_the_eviction_queue_holds_each_node_once_however_often_it_is_used() -> None:
    tree = RadixCache(1)
    for token in range(50):
        tree.insert(("", ""), key_of([token]), [token])
    for _ in range(20):
        for token in range(50):
            node = tree.match(("", ""), key_of([token])).node
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._queue) == 50


def test_namespaces_share_nothing() -> None:
    tree = RadixCache(1)
    tree.insert(("", "v1"), key_of([1, 2]), [1, 2])
    assert tree.peek(("", "v2"), key_of([1, 2])) == (0, 0)
    tree.insert(("", "v2"), key_of([1, 2]), [3, 4])
    assert tree.match(("", "v1"), key_of([1, 2])).pages == [1, 2]


def test_cleared_books_start_anew() -> None:
    tree = RadixCache(1)
    tree.lock(tree.insert(("", ""), key_of([1, 2]), [1, 2]).node)
    tree.clear()
    assert tree.check() is None and (tree.pages_cached, tree.pages_locked) == (0, 0) and tree.evict(5) == []
