"""`StopMatcher`: finds the stop string that ends a text which arrives token by token, and holds back no more than it must.

The first token that completes a stop string ends the request, so that nothing behind it is generated, counted or shown: no match waits
for one that might yet come true. Of several that one token completes, the one that starts first wins; of two that start together the
shorter, so nothing of the longer leaks. The text is cut where the winner starts, which may be tokens before.
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

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Text that surely stands before any stop string, after one more token's; at most len(longest stop) - 1 characters stay behind.

        Without `may_end`, what this token completes is text like any other; what begins in it may still be completed by a later one.
        """
        before, text = len(self._held), self._held + text
        if may_end:
            at, self.matched = self._find(text, before)
            if self.matched is not None:
                self._held = ""
                return text[:at]
        hold = self._unfinished(text)
        self._held = text[hold:]
        return text[:hold]

    def flush(self) -> str:
        """The text is over: what was held back, in which nothing is complete."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, before: int) -> tuple[int, str | None]:
        """(start of the first match that ends behind `before` characters, its stop string), or (len(text), None)."""
        best, found = len(text), None
        for stop in self._stops:
            at = text.find(stop, max(0, before - len(stop) + 1), best + len(stop) - 1)
            if 0 <= at < best:
                best, found = at, stop
        return best, found

    def _unfinished(self, text: str) -> int:
        """The first place from where the rest of `text` is the beginning of a stop string; its end, where there is none."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._firsts:
                rest = text[at:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                    return at
        return len(text)
