"""supervisord's event listener protocol on stdin and the kept fd 1.

An event is only a wake-up: it is acknowledged before anything else happens, and the truth comes with the next report.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

log = logging.getLogger(__name__)


def keep_protocol_stream() -> BinaryIO:
    """fd 1 speaks the protocol, so a stray print would end all events: keep it aside and point fd 1 at the log. First thing in control."""
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    return out


async def listen(reader: asyncio.StreamReader, out: BinaryIO, on_event: Callable[[], None]) -> None:
    """Serve the protocol until the supervisor closes it."""
    while True:
        out.write(b"READY\n")
        header = await reader.readline()
        if not header.endswith(b"\n"):
            return
        tokens = dict(token.split(":", 1) for token in header.decode("ascii", "replace").split() if ":" in token)
        await reader.readexactly(int(tokens.get("len", "0")))
        out.write(b"RESULT 2\nOK")
        on_event()


async def run(out: BinaryIO, on_event: Callable[[], None]) -> None:
    """`listen` on this process's stdin. Without a pipe there (control run by hand) reports alone carry the news."""
    reader = asyncio.StreamReader()
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    except (OSError, ValueError) as error:
        log.debug("no events from the supervisor: %s", error)
        return
    try:
        await listen(reader, out, on_event)
    except (asyncio.IncompleteReadError, BrokenPipeError, ValueError) as error:
        log.warning("no more events from the supervisor, reports go on: %s", type(error).__name__)
    finally:
        transport.close()
