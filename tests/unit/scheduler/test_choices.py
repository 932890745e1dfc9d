"""What `auto` means to a scheduler."""

from __future__ import annotations

from typing import Literal
from unittest.mock import Mock

import pytest

from llmd.scheduler.main import _overlap


@pytest.mark.parametrize(("wish", "device", "overlaps"), [("auto", "cpu", False), ("auto", "cuda:0", True), (True, "cpu", True), (False, "cuda:0", False)])
def test_overlap_is_for_gpus_unless_it_is_asked_for(wish: bool | Literal["auto"], device: str, overlaps: bool) -> None:
    assert _overlap(wish, Mock(info={"device": device})) is overlaps
