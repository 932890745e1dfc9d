"""The last 15 minutes of a few numbers, as the dashboard itself has seen them, and as the daemon tells them of the time before."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

SPAN: Final = 900.0
#: The shortest of these that holds all there is becomes the width of a chart, in seconds.
_WINDOWS: Final = (120.0, 300.0, SPAN)
#: Seconds between two samples of the daemon; what is nearer to a sample of our own adds nothing. Gaps up to a little more are none.
_STEP: Final = 5.0
_GAP: Final = 7.0
_LATELY: Final = 10.0


class History:
    """Samples of named numbers. A name that is missing in a sample was not known then."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, float | None]]] = deque()

    def take(self, now: float, sample: Mapping[str, float | None]) -> None:
        """`now` never goes back."""
        self._kept.append((now, sample))
        while self._kept[0][0] < now - SPAN:
            self._kept.popleft()

    def recall(self, samples: Sequence[tuple[float, Mapping[str, float | None]]]) -> None:
        """Fill in what was not seen here; `samples` rise."""
        own = [at for at, _ in self._kept]

        def is_new(at: float) -> bool:
            place = bisect_left(own, at)
            return all(abs(at - seen) > _STEP for seen in own[max(0, place - 1) : place + 1])

        new = [sample for sample in samples if is_new(sample[0])]
        self._kept = deque(sorted([*self._kept, *new], key=lambda sample: sample[0]))

    @property
    def since(self) -> float | None:
        """When the oldest sample was taken."""
        return self._kept[0][0] if self._kept else None

    def window(self, now: float) -> float:
        """Seconds that a chart shows."""
        age = now - self._kept[0][0] if self._kept else 0.0
        return next((window for window in _WINDOWS if age <= window), SPAN)

    def peak(self, name: str) -> float | None:
        """The most there was."""
        return max((value for _, sample in self._kept if (value := sample.get(name)) is not None), default=None)

    def last(self, name: str, now: float) -> float | None:
        """The newest value of the last seconds, if there is one."""
        return next((value for at, sample in reversed(self._kept) if now - at < _LATELY and (value := sample.get(name)) is not None), None)

    def columns(self, name: str, width: int, now: float) -> list[float | None]:
        """The mean of each of `width` equal parts of the window, the newest last; None where nothing was known."""
        window = self.window(now)
        sums, counts = [0.0] * width, [0] * width
        for at, sample in self._kept:
            place, value = width - 1 - int((now - at) / window * width), sample.get(name)
            if value is not None and 0 <= place < width:
                sums[place] += value
                counts[place] += 1
        return _joined([total / count if count else None for total, count in zip(sums, counts, strict=True)], max(1, round(_GAP * width / window)))


def _joined(values: Sequence[float | None], gap: int) -> list[float | None]:
    """With gaps of up to `gap` columns filled by what came before: one sample in some seconds does not fill a column each second."""
    joined, last, missing = [], None, 0
    for value in values:
        missing = 0 if value is not None else missing + 1
        last = value if value is not None else last
        joined.append(value if value is not None else last if missing < gap else None)
    return joined
