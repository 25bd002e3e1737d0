"""PURE. The virtual clock: events in order of time, and in a defined order at one instant."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable


class Rank(enum.IntEnum):
    """Order of events at one instant.

    What ends comes before what begins: a finished step frees its places before a message is looked at, messages arrive
    before new requests do, faults and timers see all of that, and a step starts last, so that it takes along everything
    of its instant.
    """

    STEP_END = 0
    MESSAGE_UP = 1
    MESSAGE_DOWN = 2
    ARRIVAL = 3
    FAULT = 4
    TIMER = 5
    STEP_START = 6


class EventQueue:
    """Heap of (time, rank, number of scheduling): equal time and rank run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, Rank, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, rank: Rank, action: Callable[[], None]) -> None:
        """Run `action` at `time_s`. Raises ValueError for a time that has passed."""
        if time_s < self.now:
            raise ValueError(f"cannot schedule at {time_s}: it is {self.now}")
        heapq.heappush(self._heap, (time_s, rank, self._count, action))
        self._count += 1

    def after(self, delay_s: float, rank: Rank, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` seconds."""
        self.at(self.now + delay_s, rank, action)

    def run(self, until_s: float = float("inf")) -> None:
        """Run events until none is left or the next one is later than `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()

    @property
    def is_empty(self) -> bool:
        return not self._heap
