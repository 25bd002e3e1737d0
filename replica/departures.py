"""PURE. How fast the queue has been moving lately."""

from __future__ import annotations

from collections import deque

#: the rate is a mean over this many seconds
_WINDOW_S = 5.0


class Departures:
    """Sequences that left the queue to run, by time."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, now: float, count: int) -> None:
        if count:
            self._counts.append((now, count))
            self._sum += count

    def rate(self, now: float) -> float:
        """A second."""
        while self._counts and self._counts[0][0] < now - _WINDOW_S:
            self._sum -= self._counts.popleft()[1]
        return self._sum / _WINDOW_S

    def validate(self) -> None:
        """Raises AssertionError."""
        assert self._sum == sum(count for _, count in self._counts), "departures are counted wrongly"
