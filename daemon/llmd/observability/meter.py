"""How far a long job of the command line is: a bar on a terminal, elsewhere a line for each tenth."""

from __future__ import annotations

import time
from typing import TextIO

_WIDTH = 30
_EVERY_S = 0.1


class Meter:
    """Writes to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._drawn_at = 0.0
        self._tenth = 0

    def line(self, text: str) -> None:
        """One line, below which the bar begins anew. A terminal's line may hold a bar, ours or the start's."""
        self._stream.write(("\r\x1b[K" if self._terminal else "") + f"llmd: {text}\n")
        self._stream.flush()
        self._tenth = 0

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes; a total of 0 is not known."""
        if not total:
            return
        if not self._terminal:
            tenth = done * 10 // total
            if tenth > self._tenth:
                self._tenth = tenth
                self._stream.write(f"llmd: {tenth * 10} % of {total / 2**20:.0f} MiB\n")
                self._stream.flush()
            return
        now = time.monotonic()
        if now - self._drawn_at >= _EVERY_S or done >= total:
            full = done * _WIDTH // total
            self._stream.write(f"\r\x1b[K[{'#' * full}{'-' * (_WIDTH - full)}] {done / total:4.0%} of {total / 2**20:.0f} MiB")
            self._stream.flush()
            self._drawn_at = now
