"""The fixture that makes embedded supervisors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.supervisor.harness import Embedded


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Callable[..., Embedded]]:
    """Makes supervisors; ends them, and so their children, with the test."""
    made: list[Embedded] = []

    def make(specs: list[dict[str, Any]], **settings: Any) -> Embedded:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Embedded(directory, specs, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()
