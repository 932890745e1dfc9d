"""What `auto` means to a scheduler."""

from __future__ import annotations

from typing import Literal
from unittest.mock import Mock

import pytest

from llmd.scheduler.main import _overlap


@pytest.mark.parametrize(
    ("wish", "device", "kernels", "overlaps"),
    [
        ("auto", "cpu", "torch", False),
        ("auto", "cpu", "avx2", True),
        ("auto", "cuda:0", "torch", True),
        (True, "cpu", "torch", True),
        (False, "cpu", "avx2", False),
        (False, "cuda:0", "torch", False),
    ],
)
def test_overlap_is_for_what_computes_without_the_interpreter(wish: bool | Literal["auto"], device: str, kernels: str, overlaps: bool) -> None:
    assert _overlap(wish, Mock(info={"device": device, "kernels": kernels})) is overlaps
