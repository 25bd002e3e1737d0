"""PURE. Sequences that wait for their turn, in the order that the router's key and the policy give."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from replica.messages import OrderKey
from replica.sequence import Sequence, Status


def _key(sequence: Sequence) -> tuple[OrderKey, int]:
    return (sequence.order_key, sequence.seq_id)


class WaitingQueue:
    """Sorted by (order key, seq_id). The same key sorts at the router, so both places agree on who is next.

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

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def push(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_key)
        self._count(sequence, 1)

    def peek(self) -> Sequence | None:
        return self._items[0] if self._items else None

    def pop(self) -> Sequence:
        sequence = self._items.pop(0)
        self._count(sequence, -1)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._items, _key(sequence), key=_key)
        assert self._items[position] is sequence, f"{sequence} is not in the queue"
        del self._items[position]
        self._count(sequence, -1)

    def holds(self, sequence: Sequence) -> bool:
        position = bisect_left(self._items, _key(sequence), key=_key)
        return position < len(self._items) and self._items[position] is sequence

    def validate(self) -> None:
        """Check order and sums. Raises AssertionError."""
        assert self._items == sorted(self._items, key=_key), "out of order"
        assert self.num_tokens == sum(s.num_tokens for s in self), "tokens are counted wrongly"
        assert self.num_prompt_tokens == sum(s.num_prompt_tokens for s in self), "prompt tokens are counted wrongly"
        assert self.num_fresh == sum(s.status is Status.QUEUED for s in self), "fresh ones are counted wrongly"

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens += sign * sequence.num_tokens
        self.num_prompt_tokens += sign * sequence.num_prompt_tokens
        self.num_fresh += sign * (sequence.status is Status.QUEUED)
