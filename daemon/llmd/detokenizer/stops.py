"""`StopMatcher`: finds the earliest stop string in a text that arrives piece by piece, and holds back no more than it must.

The result depends on the whole text only, never on how it was cut into pieces: the match that starts first wins; of two that
start together the one that is complete first, so nothing of the longer leaks. A match waits only while one that starts
before it may still come true.
"""

from __future__ import annotations


class StopMatcher:
    """Of one request. After `matched` is set, nothing more is to be fed."""

    __slots__ = ("_firsts", "_held", "_reach", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(sorted(filter(None, set(stops)), key=len))
        self._firsts = {stop[0] for stop in self._stops}
        self._reach = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that surely stands before any stop string; at most len(longest stop) - 1 characters stay behind."""
        text = self._held + text
        at, stop = self._find(text)
        hold = self._unfinished(text, len(text) if stop is None else at)
        if hold is not None:
            self._held = text[hold:]
            return text[:hold]
        self._held, self.matched = "", stop
        return text[:at]

    def flush(self) -> str:
        """The text is over: what was held back, up to a stop string that it may hold."""
        text, self._held = self._held, ""
        at, self.matched = self._find(text)
        return text[:at]

    def _find(self, text: str) -> tuple[int, str | None]:
        """(start of the first match, its stop string), or (len(text), None)."""
        best, found = len(text), None
        for stop in self._stops:
            at = text.find(stop, 0, best + len(stop) - 1)
            if 0 <= at < best:
                best, found = at, stop
        return best, found

    def _unfinished(self, text: str, end: int) -> int | None:
        """The first place before `end` from where the rest of `text` is the beginning of a stop string."""
        for at in range(max(0, len(text) - self._reach), end):
            if text[at] in self._firsts:
                rest = text[at:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                    return at
        return None
