"""The scheduler process, seen from its peers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.scheduler.engine import EOS, SLOW, Engine, echo

Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines in short directories (socket paths are limited to 107 bytes) and ends them."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmd-")))

        def begin(**options: Any) -> Engine:
            return stack.enter_context(Engine(directory, **options))

        yield begin


def test_it_answers_and_tells_what_it_is(start: Start) -> None:
    engine = start()
    engine.send("a", [104, 105], 5)
    (answer,) = engine.wait_over("a")
    assert answer.tokens == [104, 105, 104, 105, 104]
    assert answer.finish is not None and answer.finish.reason == "length"
    assert engine.ready is not None
    info = engine.ready.info
    assert info["context_length"] == 1024 and info["kv"]["page_size"] == 16 and info["max_running_requests"] == 64
    assert info["max_total_tokens"] == info["kv"]["pages_total"] * 16 == 64 * 1024
    assert engine.terminate() == 0
