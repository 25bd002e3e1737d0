"""PURE. Sequences that wait for their turn, in the order that the policy makes of the router's key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from replica.order import QueueKey
from replica.sequence import Sequence, Status

_key = attrgetter("queue_key")


class WaitClock:
    """Since when the one that waits longest has been waiting. It need not be the first in order, so a heap of all that
    began to wait is kept, and who waits no more is dropped when it comes to the top, or when most of them are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def begin(self, sequence: Sequence, num_waiting: int) -> None:
        """`sequence` waits since `record.waiting_since`, one of `num_waiting`."""
        if len(self._heap) > 64 + 2 * num_waiting:
            self._heap = [entry for entry in self._heap if _still_waits(entry)]
            heapify(self._heap)
        heappush(self._heap, (sequence.record.waiting_since, sequence.seq_id, sequence))

    def oldest(self) -> float | None:
        """None: nobody waits."""
        while self._heap and not _still_waits(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None


def _still_waits(entry: tuple[float, int, Sequence]) -> bool:
    since, _, sequence = entry
    return sequence.status in (Status.QUEUED, Status.RETURNING) and sequence.record.waiting_since == since


class WaitingQueue:
    """Sorted by `Sequence.queue_key`, which changes only through `sort_by` while a sequence is in here
    (`replica/order.py`).

    A sequence that comes back (preempted) has its old key and so its old place: it never falls behind a later one (vLLM
    #41951).
    """

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        #: sums over all of them, so that a load message needs no walk
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        #: of them, those that were never scheduled
        self.num_fresh = 0
        #: whose they are: tenant -> how many
        self.tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        """Least urgent first."""
        return reversed(self._items)

    def push(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_key)
        self._count(sequence, 1)

    def at(self, position: int) -> Sequence | None:
        """None behind the last one."""
        return self._items[position] if position < len(self._items) else None

    @property
    def last(self) -> Sequence | None:
        """The least urgent one."""
        return self._items[-1] if self._items else None

    def take(self, position: int) -> None:
        """Whoever is there leaves; those behind move up."""
        self._count(self._items.pop(position), -1)

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._items, sequence.queue_key, key=_key)
        assert self._items[position] is sequence, f"{sequence} is not in the queue"
        self.take(position)

    def sort_by(self, key_of: Callable[[Sequence], QueueKey]) -> None:
        """Another order for all who are in here; `key_of` gives the new keys."""
        for sequence in self._items:
            sequence.queue_key = key_of(sequence)
        self._items.sort(key=_key)

    def holds(self, sequence: Sequence) -> bool:
        position = bisect_left(self._items, sequence.queue_key, key=_key)
        return self.at(position) is sequence

    def validate(self) -> None:
        """Check order and sums. Raises AssertionError."""
        assert self._items == sorted(self._items, key=_key), "out of order"
        assert self.num_tokens == sum(s.num_tokens for s in self), "tokens are counted wrongly"
        assert self.num_prompt_tokens == sum(s.num_prompt_tokens for s in self), "prompt tokens are counted wrongly"
        assert self.tenants == Counter(s.tenant for s in self), "tenants are counted wrongly"
        assert self.num_fresh == sum(s.status is Status.QUEUED for s in self), "fresh ones are counted wrongly"

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens += sign * sequence.num_tokens
        self.num_prompt_tokens += sign * sequence.num_prompt_tokens
        self.num_fresh += sign * (sequence.status is Status.QUEUED)
        count = self.tenants.get(sequence.tenant, 0) + sign
        if count:
            self.tenants[sequence.tenant] = count
        else:
            del self.tenants[sequence.tenant]
