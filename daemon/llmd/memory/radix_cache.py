"""`RadixCache`: which KV pages hold which token sequences, so that a prompt's known prefix is not computed again.

A tree per namespace (adapter, weights version). An edge holds whole pages of tokens; two edges of one node differ in their first
page. The tree owns its pages until `evict` hands them back. Pages on the path to a locked node are in use and stay; the others are
*cached*. Called by the scheduler's one thread through its KvManager; never touches the allocator or a page table.

A key is the tokens as int32 bytes: compared by memcmp, cut by slices. Matching costs O(length), evicting O(log nodes) a node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

#: Bytes of one token in a key.
TOKEN_BYTES = 4

Eviction = Literal["lru", "lfu", "fifo"]
Namespace = tuple[str, str]


@dataclass(slots=True, eq=False)
class Node:
    """The tokens of `key`, page by page in `pages`, after those of `parent`. A root holds none."""

    key: bytes
    pages: list[int]
    parent: Node | None
    namespace: Namespace
    created: int
    used: int
    """When it was last matched or inserted, in the cache's own count."""
    hits: int = 0
    locks: int = 0
    """How many locks lie on it or below."""
    queued: bool = False
    """It has its one entry in the eviction queue."""
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: its pages, and its last node (a root where nothing is known)."""

    node: Node
    pages: list[int]


#: What goes first. A priority only grows, so an old entry of the queue comes up too early at worst and is put back.
_PRIORITY: dict[Eviction, Callable[[Node], tuple[int, int]]] = {
    "lru": lambda node: (node.used, 0),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.created, 0),
}


def common_tokens(one: bytes, other: bytes, start: int = 0) -> int:
    """How many tokens the keys `one` and `other`, this from byte `start` on, have in common."""
    length = min(len(one), len(other) - start)
    if other.startswith(one, start) if length == len(one) else one.startswith(other[start : start + length]):
        return length // TOKEN_BYTES
    a = np.frombuffer(one, dtype=np.int32, count=length // TOKEN_BYTES)
    b = np.frombuffer(other, dtype=np.int32, count=length // TOKEN_BYTES, offset=start)
    return int(np.argmax(a != b))


class RadixCache:
    """Keys are cut to whole pages; `pages_cached + pages_locked` are all that the tree owns."""

    def __init__(self, page_size: int, eviction: Eviction = "lru") -> None:
        self.page_size = page_size
        self.pages_cached = 0
        """Pages that `evict` can give back."""
        self.pages_locked = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._priority = _PRIORITY[eviction]
        self._roots: dict[Namespace, Node] = {}
        self._queue: list[tuple[tuple[int, int], int, Node]] = []
        self._clock = 0
        self._entries = 0

    @property
    def clock(self) -> int:
        """Goes on with each use of the tree."""
        return self._clock

    # ------------------------------------------------------------ what is known

    def peek(self, namespace: Namespace, key: bytes) -> tuple[int, int]:
        """(pages of the longest known prefix, how many of them are cached). Changes nothing."""
        known = cached = 0
        for node, count in self._path(namespace, key):
            known += count
            cached += 0 if node.locks else count
        return known, cached

    def match(self, namespace: Namespace, key: bytes) -> Match:
        """The longest known prefix of `key`, marked as used. A node is split where the prefix ends inside it."""
        self._clock += 1
        last, pages = self._root(namespace), list[int]()
        for node, count in self._path(namespace, key):
            last = node if count == len(node.pages) else self._split(node, count)
            last.used = self._clock
            last.hits += 1
            pages += last.pages
        return Match(last, pages)

    def insert(self, namespace: Namespace, key: bytes, pages: list[int]) -> Match:
        """Make `key` known. Returns what was known of it before, and the node at its end.

        The tree now owns `pages` from there on; those before are the caller's still: duplicates, unless they are the tree's own.
        """
        key = key[: len(key) // self._page_bytes * self._page_bytes]
        if len(pages) * self._page_bytes != len(key):
            raise ValueError(f"{len(pages)} pages do not hold {len(key) // TOKEN_BYTES} tokens")
        known = self.match(namespace, key)
        count = len(known.pages)
        if count == len(pages):
            return known
        rest = key[count * self._page_bytes :]
        node = Node(rest, pages[count:], known.node, namespace, self._clock, self._clock, hits=1)
        known.node.children[rest[: self._page_bytes]] = node
        self._roots[namespace] = self._roots.get(namespace) or known.node  # the first node of a namespace
        self.pages_cached += len(node.pages)
        self._enqueue(node)
        return Match(node, known.pages)

    # ------------------------------------------------------------ what stays

    def lock(self, node: Node) -> None:
        """Keep all pages from the root to `node` until `unlock(node)`; may be called several times."""
        while node.parent is not None:
            if not node.locks:
                self._count(node, -1)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`."""
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self._count(node, 1)
                self._enqueue(node)
            node = node.parent

    # ------------------------------------------------------------ what goes

    def evict(self, pages: int) -> list[int]:
        """Forget cached pages, ends of sequences first; returns so many, or all that there are."""
        freed: list[int] = []
        while len(freed) < pages and self._queue:
            priority, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.locks or node.children or node.parent is None:
                continue  # it comes back when its last lock or child goes
            if self._priority(node) != priority:
                self._enqueue(node)
                continue
            freed += self._cut(node, pages - len(freed))
        return freed

    def discard(self, node: Node) -> list[int]:
        """Forget the end of `node`'s sequence as far as nobody else uses it; returns its pages."""
        freed: list[int] = []
        while (parent := node.parent) is not None and not node.locks and not node.children:
            freed += self._cut(node, len(node.pages))
            node = parent
        return freed

    def flush(self) -> list[int]:
        """Forget all that is not locked."""
        return self.evict(self.pages_cached)

    def clear(self) -> None:
        """Forget everything, locks included: for when the books are wrong. Nodes handed out before are dead."""
        self._roots, self._queue = {}, []
        self.pages_cached = self.pages_locked = 0

    # ------------------------------------------------------------ the books

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> str | None:
        """None if the tree is in order; else what is wrong. Costs a walk over all nodes."""
        cached = locked = 0
        for node in self.nodes():
            if not node.pages or len(node.key) != len(node.pages) * self._page_bytes:
                return f"a node of {len(node.pages)} pages has a key of {len(node.key)} bytes"
            if node.parent is None or node.parent.children.get(node.key[: self._page_bytes]) is not node:
                return "a node is not its parent's child"
            if node.locks < sum(child.locks for child in node.children.values()):
                return "a node is locked less than its children"
            if not node.locks and not node.children and not node.queued:
                return "a node can never be evicted"
            cached += 0 if node.locks else len(node.pages)
            locked += len(node.pages) if node.locks else 0
        if (cached, locked) != (self.pages_cached, self.pages_locked):
            return f"{cached} cached and {locked} locked pages in the tree, counted are {self.pages_cached} and {self.pages_locked}"
        return None

    # ------------------------------------------------------------ the tree

    def _root(self, namespace: Namespace) -> Node:
        """A root without children is not kept: `insert` keeps it with its first node."""
        return self._roots.get(namespace) or Node(b"", [], None, namespace, 0, 0)

    def _path(self, namespace: Namespace, key: bytes) -> Iterator[tuple[Node, int]]:
        """The nodes along `key` and how many pages of each it shares; all, save for the last."""
        node, start, size = self._roots.get(namespace), 0, self._page_bytes
        while node is not None and len(key) - start >= size:
            node = node.children.get(key[start : start + size])
            if node is None:
                return
            count = self._common_pages(node.key, key, start)
            whole = count == len(node.pages)  # asked now: the caller may split the node
            yield node, count
            if not whole:
                return
            start += count * size

    def _common_pages(self, own: bytes, key: bytes, start: int) -> int:
        """Whole pages that `own` and `key` from `start` on share."""
        return common_tokens(own, key, start) // self.page_size

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` pages; returns the new upper part. `node` stays the lower one, so that locks on it hold."""
        parent, cut = node.parent, count * self._page_bytes
        assert parent is not None
        upper = Node(node.key[:cut], node.pages[:count], parent, node.namespace, node.created, node.used, node.hits, node.locks)
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[count:], upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _cut(self, node: Node, count: int) -> list[int]:
        """Take up to `count` pages from the end of an unlocked leaf; an empty one leaves the tree."""
        parent = node.parent
        assert parent is not None
        keep = max(0, len(node.pages) - count)
        freed = node.pages[keep:]
        self.pages_cached -= len(freed)
        if keep:
            node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]
            self._enqueue(node)
            return freed
        del parent.children[node.key[: self._page_bytes]]
        node.parent, node.pages = None, []
        if not parent.children:
            if parent.parent is None:
                del self._roots[parent.namespace]
            else:
                self._enqueue(parent)
        return freed

    def _count(self, node: Node, cached: int) -> None:
        """`node` became cached (1) or locked (-1)."""
        self.pages_cached += cached * len(node.pages)
        self.pages_locked -= cached * len(node.pages)

    def _enqueue(self, node: Node) -> None:
        """Queue an unlocked leaf for eviction; others get their entry when they become one."""
        if not node.queued and not node.locks and not node.children:
            node.queued = True
            self._entries += 1
            heapq.heappush(self._queue, (self._priority(node), self._entries, node))
