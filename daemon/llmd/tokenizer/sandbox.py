"""A Jinja sandbox whose templates cannot run for ever or fill memory.

Jinja's own sandbox keeps a template from Python's internals, not from endless loops. Here each loop turn and each call costs
one unit of a budget, and texts made by operators have a largest size. The budget belongs to the rendering that `budget` encloses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Loop turns and calls of one rendering: seconds at most, and far above what thousands of messages need.
MAX_STEPS = 500_000

#: Characters of a rendered prompt, and of any text on the way to it.
MAX_OUTPUT = 16 * 1024 * 1024

#: A printf-style width that alone makes a huge text.
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")

_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


class TooMuchWork(jinja2.TemplateError):
    """The template loops too often or makes too long a text."""


@contextmanager
def budget(steps: int = MAX_STEPS) -> Iterator[None]:
    """Give the rendering inside a budget of its own."""
    token = _steps_left.set([steps])
    try:
        yield
    finally:
        _steps_left.reset(token)


def _spend() -> None:
    left = _steps_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise TooMuchWork("it takes too many steps")


class _Counted:
    """An iterable that costs one step an item; keeps `len` where there is one, for `loop.length`."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def _join(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check(sum(map(len, texts)))
    return "".join(texts)


def _check(size: int) -> None:
    if size > MAX_OUTPUT:
        raise TooMuchWork(f"it makes a text longer than {MAX_OUTPUT} characters")


class _Bind(NodeTransformer):
    """Puts each loop's iterable and each `~` under the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_llmd_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "_llmd_join", [], [], None, None, lineno=node.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Immutable sandbox with budgets. Render only inside `budget`."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(autoescape=False, **options)
        self.filters["_llmd_counted"] = _Counted
        self.filters["_llmd_join"] = _join

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bind().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call(self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes."""
        _spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make big values of small ones."""
        if operator == "**":
            raise TooMuchWork("** is not available")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TooMuchWork("a text format with such a width is not available")
        sized = left if hasattr(left, "__len__") else right
        if operator == "*" and hasattr(sized, "__len__"):
            times = right if sized is left else left
            _check(len(sized) * (times if isinstance(times, int) else 1))
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)
