"""Heartbeats as tests read them: with what they leave out, because it has been told."""

from __future__ import annotations

import msgspec

from llmd.wire.messages import Heartbeat, Totals
from llmd.wire.tables import Tables


def whole(beat: Heartbeat, last: Heartbeat | None) -> Heartbeat:
    """`beat` with the totals and tables of the one before it (which `whole` has given), where it has none."""
    totals = beat.totals or (last and last.totals) or Totals()
    tables = beat.tables or (last and last.tables) or Tables()
    return msgspec.structs.replace(beat, totals=totals, tables=tables)


def totals_of(beat: Heartbeat) -> Totals:
    """Of a whole one."""
    assert beat.totals is not None
    return beat.totals
