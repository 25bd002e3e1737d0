"""PURE. The unfinished requests of a replica, each with those of its sequences that have not ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replica.messages import RequestId, RouterId
from replica.sequence import Sequence, Status

RequestKey = tuple[RouterId, RequestId]


def key_of(sequence: Sequence) -> RequestKey:
    return (sequence.router_id, sequence.request_id)


class RequestBook:
    """Who belongs together. A request that is over is forgotten at once: its id may come back."""

    def __init__(self) -> None:
        self._sequences: dict[RequestKey, list[Sequence]] = {}
        #: of how many sequences each consisted when it came
        self._sizes: dict[RequestKey, int] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(list(self._sequences))

    def add(self, key: RequestKey, sequences: list[Sequence]) -> None:
        self._sequences[key] = sequences
        self._sizes[key] = len(sequences)

    def of(self, key: RequestKey) -> list[Sequence]:
        """Its living sequences; none if it is unknown."""
        return list(self._sequences.get(key, ()))

    def forget(self, sequence: Sequence) -> None:
        """It has ended, for its router at least."""
        key = key_of(sequence)
        siblings = self._sequences[key]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[key], self._sizes[key]

    def untouched(self, sequence: Sequence) -> list[Sequence]:
        """All sequences of its request if none of them was ever scheduled or ended, else none: what was begun is
        brought to its end.
        """
        key = key_of(sequence)
        siblings = self._sequences.get(key, [])
        if len(siblings) != self._sizes.get(key) or any(s.status is not Status.QUEUED for s in siblings):
            return []
        return list(siblings)

    def validate(self, living: Iterable[Sequence]) -> None:
        """Raises AssertionError if these are not the ones in the book."""
        known = {s.seq_id for sequences in self._sequences.values() for s in sequences}
        assert known == {s.seq_id for s in living}, "request book and scheduler disagree"
        assert self._sizes.keys() == self._sequences.keys(), "sizes of requests that are over"
        assert all(len(s) <= self._sizes[key] for key, s in self._sequences.items()), "a request has grown"
