"""PURE. Requests that must have begun by a certain time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from replica.sequence import Sequence, Status


class Deadlines:
    """A heap. Whoever began or ended meanwhile stays in it until its time comes, or until half of it is such."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._prune_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest deadline of somebody who is still queued."""
        while self._heap and self._heap[0][2].status is not Status.QUEUED:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, sequence: Sequence) -> None:
        heappush(self._heap, (deadline, sequence.seq_id, sequence))
        if len(self._heap) > self._prune_at:
            self._heap = [item for item in self._heap if item[2].status is Status.QUEUED]
            heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))

    def pop_passed(self, now: float) -> list[Sequence]:
        """Queued sequences whose time is up, each once."""
        passed = []
        while (first := self.next) is not None and first <= now:
            passed.append(heappop(self._heap)[2])
        return passed
