"""PURE. Sequences that wait for their turn, in the order that the router's key and the policy give."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from replica.messages import OrderKey
from replica.sequence import Sequence


def _key(sequence: Sequence) -> tuple[OrderKey, int]:
    return (sequence.order_key, sequence.seq_id)


class WaitingQueue:
    """Sorted by (order key, seq_id). The same key sorts at the router, so both places agree on who is next.

    A sequence that comes back (preempted) has its old key and so its old place: it never falls behind a later one (vLLM
    #41951).
    """

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def push(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_key)

    def peek(self) -> Sequence | None:
        return self._items[0] if self._items else None

    def pop(self) -> Sequence:
        return self._items.pop(0)

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._items, _key(sequence), key=_key)
        assert self._items[position] is sequence, f"{sequence} is not in the queue"
        del self._items[position]
