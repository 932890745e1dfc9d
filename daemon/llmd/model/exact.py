"""Products whose rows do not depend on each other: a row's bits are the same alone and in any batch.

How a matrix library adds up depends on the shape it is given, so two shapes may differ in the last bit. `row_plan` finds by
measurement which numbers of rows agree on this machine: with Intel MKL and MKL_CBWR=AUTO,STRICT, which the plan sets for the
engine, all do; elsewhere perhaps all but one, and at worst the rows go in tiles of one fixed size, the last one padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

#: Rows of the fixed tile where the library's order depends on the number of rows.
TILE = 16
#: Elements of a weight above which a product takes fewer rows at once, so that measuring stays quick.
_LARGE = 2**23
_COUNTS = (1, 2, 3, 5, 8, 16, 31, 64, 256)

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How many rows a product takes at once: from `least` (fewer are padded) to `size`. The fixed tile has both equal."""

    least: int
    size: int


#: No promise, no limit: for devices whose libraries are not held to one order.
ANY_ROWS = RowPlan(1, 2**31)
_FIXED = RowPlan(TILE, TILE)


def row_plan(product: Product, width: int, like: torch.Tensor, size: int) -> RowPlan:
    """Plan for `product`, which maps [rows, width] to [rows, out]. `like` gives type and device, `size` how many rows would be taken at most."""
    if like.device.type != "cpu":
        return ANY_ROWS
    rows = torch.randn(size, width, generator=torch.Generator().manual_seed(0)).to(like.dtype)
    whole = product(rows)
    differ = [count for count in _COUNTS if count < size and not torch.equal(product(rows[:count]), whole[:count])]
    return RowPlan(1, size) if not differ else RowPlan(2, size) if differ == [1] else _FIXED


def linear_plan(weight: torch.Tensor) -> RowPlan:
    """Plan for x @ weight; `weight` [in, out]."""
    size = _COUNTS[-1] if weight.numel() < _LARGE else _COUNTS[-2]
    return row_plan(lambda x: torch.mm(x, weight), weight.shape[0], weight, size)


def rowwise(x: torch.Tensor, weight: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """x @ weight by `plan`: [T, in] @ [in, out] -> [T, out]."""
    count, size = x.shape[0], plan.size
    if plan.least <= count <= size:
        return torch.mm(x, weight)
    padding = max(0, plan.least - (count % size or size))
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    out = torch.empty((count + padding, weight.shape[1]), dtype=x.dtype, device=x.device)
    for start in range(0, count, size):
        torch.mm(padded[start : start + size], weight, out=out[start : start + size])
    return out[:count]
