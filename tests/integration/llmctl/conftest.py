"""llmctl in the tests' own process, which plays the daemon as well: when it has been held up, an answer is late for no fault of llmctl's."""

from __future__ import annotations

import pytest

from tests.daemon import SLOW


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.context.READ_TIMEOUT", 20 * SLOW)
