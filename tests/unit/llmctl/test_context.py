"""What a verb makes of an answer that does not come."""

from __future__ import annotations

import argparse
import time
from typing import Any, cast

import pytest

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError


class Silent:
    """A daemon that nobody listens for, or that answers too late."""

    def __init__(self, after: float) -> None:
        self._after = after

    def get(self, path: str, timeout: float) -> Any:
        time.sleep(min(self._after, timeout))
        raise CtlError(exits.NOT_ANSWERING, "no answer", "ask again")


@pytest.mark.parametrize(
    ("after", "limit", "status"),
    [(0.0, 30.0, exits.NOT_ANSWERING), (60.0, 0.1, exits.TIMED_OUT), (0.0, None, exits.NOT_ANSWERING)],
    ids=["nobody listens", "too late", "no limit of one's own"],
)
def test_only_an_answer_that_was_waited_for_has_timed_out(after: float, limit: float | None, status: int) -> None:
    context = Context(argparse.Namespace(timeout=limit), cast(Any, Silent(after)), cast(Any, None), cast(Any, None))
    with pytest.raises(CtlError) as raised:
        context.get("/v1/status")
    assert raised.value.status == status
