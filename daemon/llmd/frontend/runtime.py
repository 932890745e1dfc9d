"""`Runtime`: what the parts of one frontend share."""

from __future__ import annotations

from dataclasses import dataclass

from llmd.frontend.access_log import AccessLog
from llmd.frontend.engine_view import EngineView
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter
from llmd.plan.spec import Boot


@dataclass(frozen=True, slots=True)
class Runtime:
    """Made once, before the first request."""

    boot: Boot
    view: EngineView
    manager: TokenizerManager
    meter: Meter
    access_log: AccessLog
