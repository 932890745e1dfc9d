"""`StopMatcher`: finds the stop string that ends a text which arrives token by token, and holds back no more than it must.

The text is cut where a stop string first stands in it; of two that start at the same place the shorter one ended it. So the outcome depends
on the whole text alone, not on which stop string was complete first: one that is complete waits while one that starts before it may still
come true. The tokens end with the one that completed the winner, so nothing that came while it waited is delivered or counted.
"""

from __future__ import annotations


class StopMatcher:
    """Of one request. After `matched` is set, nothing more is to be fed."""

    __slots__ = ("_at", "_firsts", "_found", "_held", "_min_tokens", "_reach", "_stops", "ended", "matched")

    def __init__(self, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        """What one of the first `min_tokens` tokens completes is text; what begins there may still be completed by a later one."""
        self._stops = tuple(sorted(filter(None, set(stops)), key=len))
        self._firsts = {stop[0] for stop in self._stops}
        self._reach = max(map(len, self._stops), default=1) - 1
        self._min_tokens = min_tokens
        self._held = ""
        self._found: str | None = None
        """Complete, but not the winner yet; it stands at `_at` of `_held`."""
        self._at = 0
        self.ended: int | None = None
        """How many tokens the text has up to the one that completed the winner, or what will be if nothing before it comes true."""
        self.matched: str | None = None
        """The winner."""

    def feed(self, text: str, count: int) -> str:
        """Text that surely stands before any stop string, after token number `count`; at most len(longest stop) - 1 characters stay behind."""
        if not text:
            return ""
        before, text = len(self._held), self._held + text
        if count > self._min_tokens:
            self._find(text, before, count)
        end = len(text) if self._found is None else self._at
        hold = self._unfinished(text, end)
        if hold == end and self._found is not None:
            return self._win(text)
        self._held = text[hold:]
        self._at -= hold
        return text[:hold]

    def flush(self) -> str:
        """The text is over: what was held back, up to the stop string that may have waited in it."""
        if self._found is not None and self.matched is None:
            return self._win(self._held)
        text, self._held = self._held, ""
        return text

    def _win(self, text: str) -> str:
        self._held, self.matched = "", self._found
        return text[: self._at]

    def _find(self, text: str, before: int, count: int) -> None:
        """Note the first stop string that token `count`, all that is behind `before` characters, completes, if it starts before the one that waits."""
        best = len(text) if self._found is None else self._at
        for stop in self._stops:
            at = text.find(stop, max(0, before - len(stop) + 1), best + len(stop) - 1)
            if 0 <= at < best:
                best, self._at, self._found, self.ended = at, at, stop, count

    def _unfinished(self, text: str, end: int) -> int:
        """The first place before `end` from where the rest of `text` is the beginning of a stop string; `end`, where there is none."""
        for at in range(max(0, len(text) - self._reach), end):
            if text[at] in self._firsts:
                rest = text[at:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                    return at
        return end
