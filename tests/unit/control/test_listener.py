"""The event listener protocol: acknowledged at once, then one wake-up an event."""

from __future__ import annotations

import asyncio
import io

from llmd.control.listener import listen


async def test_each_event_is_acknowledged_and_wakes_once() -> None:
    reader, out, woken = asyncio.StreamReader(), io.BytesIO(), []
    for body in (b"processname:x", b""):
        reader.feed_data(b"ver:3.0 eventname:PROCESS_STATE_EXITED len:%d\n" % len(body) + body)
    reader.feed_eof()
    await listen(reader, out, lambda: woken.append(out.getvalue()))
    assert out.getvalue() == b"READY\n" + b"RESULT 2\nOKREADY\n" * 2
    assert [sent.endswith(b"RESULT 2\nOK") for sent in woken] == [True, True]
