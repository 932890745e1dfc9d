"""`Runtime`: what the parts of one frontend share; `EngineSide`: the half of it that knows nothing of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmd.frontend.access_log import AccessLog
from llmd.frontend.engine_view import EngineView
from llmd.frontend.request_log import RequestLog
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.observability.totals import Meter
from llmd.plan.spec import Boot

if TYPE_CHECKING:  # it brings the HTTP server along, which a frontend without HTTP has no use for
    from llmd.frontend.stream import Streams


@dataclass(frozen=True, slots=True)
class EngineSide:
    """Made once, before the first request. All that a frontend without HTTP needs (llmd.engine)."""

    boot: Boot
    view: EngineView
    manager: TokenizerManager
    meter: Meter


@dataclass(frozen=True, slots=True)
class Runtime(EngineSide):
    """The same for one that serves HTTP."""

    access_log: AccessLog
    request_log: RequestLog | None = None
    streams: Streams = field(default_factory=lambda: _streams())


def _streams() -> Streams:
    from llmd.frontend.stream import Streams

    return Streams()
