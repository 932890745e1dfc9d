"""Entry of the control process: `run(context) -> exit status`."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from llmd.control import listener
from llmd.plan.context import WorkerContext


def run(context: WorkerContext) -> int:
    """Run control until SIGTERM. fd 1 belongs to the supervisor's event protocol, so it is put aside before anything can print."""
    events = listener.keep_protocol_stream()
    return asyncio.run(_run(context, events))


async def _run(context: WorkerContext, events: BinaryIO) -> int:
    from llmd.control.app import ControlApp

    return await ControlApp(context, events).run()
