"""PURE. What the dispatcher knows of one unfinished request, and the order of those it holds."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from replica.messages import OrderKey, ReplicaId, RequestId, aged_priority


class State(enum.Enum):
    """Where a request is, seen from the router."""

    HELD = "held"
    SENT = "sent"
    ACCEPTED = "accepted"


class Tracked:
    """One unfinished request. Times are in the dispatcher's clock."""

    __slots__ = (
        "awaits_place",
        "deadline_at",
        "epoch",
        "has_begun",
        "held_key",
        "held_until",
        "hold_left_s",
        "is_returning",
        "num_losses",
        "num_sequences",
        "num_tokens",
        "order_key",
        "replica_id",
        "request_id",
        "resume_by",
        "state",
        "tried",
        "was_shed",
    )

    def __init__(
        self,
        request_id: RequestId,
        num_sequences: int,
        num_tokens: int,
        order_key: OrderKey,
        deadline_at: float | None,
        hold_left_s: float,
    ) -> None:
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.order_key = order_key
        #: when it must have begun
        self.deadline_at = deadline_at
        #: how long it may still be held, before any replica has begun it
        self.hold_left_s = hold_left_s
        self.state = State.HELD
        self.replica_id: ReplicaId | None = None
        self.epoch = 0
        #: a token reached the client: no refusal any more
        self.has_begun = False
        #: it began at a replica: no cap applies any more, and no deadline
        self.is_returning = False
        #: a replica gave its place to a more urgent one
        self.was_shed = False
        self.held_until: float | None = None
        #: it is held because it lost its replica
        self.awaits_place = False
        #: it lost its replica, and has to have its next token by then
        self.resume_by: float | None = None
        #: its place among the held; set while it is one of them
        self.held_key: tuple[bool, float, float, int] = (True, 0.0, 0.0, 0)
        #: replicas that said no, with the number of their news at that moment: not again before there is newer news
        self.tried: dict[ReplicaId, int] = {}
        self.num_losses = 0

    @property
    def priority(self) -> int:
        return self.order_key[1]

    def is_overdue(self, now: float) -> bool:
        """Its deadline has passed, and as far as is known it has not begun."""
        return self.deadline_at is not None and self.deadline_at <= now and not self.is_returning

    def stop_holding(self, now: float) -> None:
        """A replica took it. If it is given back without having begun, it is held only for what is left of its time."""
        if self.held_until is not None and not self.is_returning:
            # never more than before: after a loss it was held for a replacement, which is another allowance
            self.hold_left_s = min(self.hold_left_s, max(0.0, self.held_until - now))
        self.held_until = None


class HeldRequests:
    """Returning ones first, then the others by the key that replicas sort by as well. `ageing_s` as in
    `replica/order.py`; None: the policy does not look at priorities.
    """

    def __init__(self, ageing_s: float | None) -> None:
        self._ageing_s = ageing_s
        self._sorted: list[Tracked] = []
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Tracked]:
        """A copy is walked, so members may leave meanwhile."""
        return iter(self._sorted.copy())

    def __contains__(self, request: Tracked) -> bool:
        position = bisect_left(self._sorted, request.held_key, key=_held_key)
        return position < len(self._sorted) and self._sorted[position] is request

    def weaker_than(self, order_key: OrderKey) -> Tracked | None:
        """The last one in order that a request with this key outranks. A look at the very last is not enough: it may be
        as urgent and only younger, where the key is that of a request which was shed and is old itself.
        """
        value = self.value(order_key)
        for request in reversed(self._sorted):
            if request.is_returning or self.value(request.order_key) <= value:
                return None
            if self.outranks(order_key, request.priority, self.value(request.order_key)):
                return request
        return None

    def value(self, order_key: OrderKey) -> float:
        """What the policy makes of a key: smaller goes first."""
        return order_key[2] if self._ageing_s is None else aged_priority(order_key, self._ageing_s)

    def outranks(self, order_key: OrderKey, priority: int, value: float) -> bool:
        """Strictly more urgent than somebody of that priority and value, his waiting counted, so that it may take his
        place.
        """
        return self._ageing_s is not None and order_key[1] < priority and self.value(order_key) < value

    def push(self, request: Tracked) -> None:
        self._num_ever += 1
        turn = request.order_key[0]
        request.held_key = (not request.is_returning, turn, self.value(request.order_key), self._num_ever)
        insort(self._sorted, request, key=_held_key)

    def order_by(self, ageing_s: float | None) -> None:
        """Another policy: all are sorted again; of equals whoever was held first stays first."""
        if ageing_s == self._ageing_s:
            return
        self._ageing_s = ageing_s
        for request in self._sorted:
            is_fresh, turn, _, number = request.held_key
            request.held_key = (is_fresh, turn, self.value(request.order_key), number)
        self._sorted.sort(key=_held_key)

    def discard(self, request: Tracked) -> None:
        """Idempotent."""
        position = bisect_left(self._sorted, request.held_key, key=_held_key)
        if position < len(self._sorted) and self._sorted[position] is request:
            del self._sorted[position]

    def validate(self) -> None:
        """Raises AssertionError if the order is broken."""
        assert self._sorted == sorted(self._sorted, key=_held_key), "held requests are out of order"
        assert all(request.held_key[0] != request.is_returning for request in self._sorted), "a class has changed"


_held_key = attrgetter("held_key")
