"""PURE. The requests that a router holds, in the order in which they are offered to replicas.

Returning ones come first. Of the others each tenant has a line of its own, sorted by the key that replicas sort by as
well, and the lines are drawn from in turns by weight: a tenant that sends a thousand requests waits behind itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from replica.messages import OrderKey, Wish, aged_priority
from router.tracked import Tracked

_key = attrgetter("held_key")


class _Line:
    """Sorted by `held_key`."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.requests: list[Tracked] = []

    def __contains__(self, request: Tracked) -> bool:
        position = bisect_left(self.requests, request.held_key, key=_key)
        return position < len(self.requests) and self.requests[position] is request

    def push(self, request: Tracked) -> None:
        insort(self.requests, request, key=_key)

    def remove(self, request: Tracked) -> None:
        del self.requests[bisect_left(self.requests, request.held_key, key=_key)]


class Draw:
    """A walk over held requests as they were when it began: returning ones, then the tenants' lines in turns."""

    def __init__(self, returning: list[Tracked], lines: Iterable[_Line]) -> None:
        self._returning = deque(returning)
        lists = [(line.requests.copy(), line.weight) for line in lines]
        #: the next of each line: its turn and key, then the line and how far it was walked
        self._heads = [(0.0, requests[0].held_key, requests, 0, weight) for requests, weight in lists]
        heapify(self._heads)

    def __iter__(self) -> Iterator[Tracked]:
        while self._returning:
            yield self._returning.popleft()
        while self._heads:
            _, _, requests, position, weight = self._heads[0]
            yield requests[position]
            if not self._heads or self._heads[0][2] is not requests:
                continue  # it was closed
            if position + 1 < len(requests):
                following = ((position + 1) / weight, requests[position + 1].held_key, requests, position + 1, weight)
                heapreplace(self._heads, following)
            else:
                heappop(self._heads)

    def close(self) -> None:
        """Nobody more of the line of the one that came last."""
        if self._returning:
            self._returning.clear()
        else:
            heappop(self._heads)


class HeldRequests:
    """`ageing_s` as in `replica/order.py`; None: the policy does not look at priorities."""

    def __init__(self, ageing_s: float | None) -> None:
        self._ageing_s = ageing_s
        self._returning = _Line()
        self._fresh: dict[str, _Line] = {}
        self._num_ever = 0
        #: grows with every change of who is held, and in what order
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._returning.requests) + sum(len(line.requests) for line in self._fresh.values())

    def __iter__(self) -> Iterator[Tracked]:
        """All, line by line: cheaper than `draw` where the order is nobody's concern. A copy is walked."""
        lines = (self._returning, *self._fresh.values())
        return iter([request for line in lines for request in line.requests])

    def __contains__(self, request: Tracked) -> bool:
        return request in self._returning or ((line := self._fresh.get(request.tenant)) is not None and request in line)

    def draw(self) -> Draw:
        """All, in the order in which they are offered. A copy is walked, so members may leave meanwhile."""
        return Draw(self._returning.requests, self._fresh.values())

    def tenants(self) -> list[str]:
        """Of the requests that no replica has begun."""
        return list(self._fresh)

    def first_of(self, tenant: str, limit: int) -> tuple[list[Tracked], float]:
        """The first of the tenant's requests that no replica has begun, and its weight."""
        line = self._fresh.get(tenant)
        return ([], 1.0) if line is None else (line.requests[:limit], line.weight)

    def wish(self, request: Tracked) -> Wish:
        """How its place in its tenant's line is told to replicas."""
        return Wish(request.num_sequences, self.value(request.order_key))

    def weaker_than(self, order_key: OrderKey, tenant: str = "", weight: float = 1.0) -> Tracked | None:
        """Who has to leave so that a request with this key may be held: of its own tenant the last one in order that it
        outranks, else the last one of a tenant that holds more for its weight, the newcomer counted.
        """
        own = self._fresh.get(tenant)
        if own is not None and (weaker := self._outranked(order_key, own)) is not None:
            return weaker
        share = ((0 if own is None else len(own.requests)) + 1) / weight
        others = [line for name, line in self._fresh.items() if name != tenant]
        largest = max(others, key=lambda line: (len(line.requests) - 1) / line.weight, default=None)
        if largest is None or (len(largest.requests) - 1) / largest.weight < share:
            return None
        return largest.requests[-1]

    @property
    def has_classes(self) -> bool:
        """The policy looks at priorities."""
        return self._ageing_s is not None

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
        self.num_changes += 1
        request.held_key = (self.value(request.order_key), self._num_ever)
        if request.is_returning:
            self._returning.push(request)
            return
        line = self._fresh.setdefault(request.tenant, _Line())
        line.weight = request.tenant_weight  # it may have been changed: the latest counts
        line.push(request)

    def order_by(self, ageing_s: float | None) -> None:
        """Another policy: all are sorted again; of equals whoever was held first stays first."""
        if ageing_s == self._ageing_s:
            return
        self._ageing_s = ageing_s
        self.num_changes += 1
        for line in (self._returning, *self._fresh.values()):
            for request in line.requests:
                request.held_key = (self.value(request.order_key), request.held_key[1])
            line.requests.sort(key=_key)

    def discard(self, request: Tracked) -> None:
        """Idempotent."""
        if request in self._returning:
            self._returning.remove(request)
            self.num_changes += 1
        elif (line := self._fresh.get(request.tenant)) is not None and request in line:
            line.remove(request)
            self.num_changes += 1
            if not line.requests:
                del self._fresh[request.tenant]

    def validate(self) -> None:
        """Raises AssertionError if the order is broken."""
        for line in (self._returning, *self._fresh.values()):
            assert line.requests == sorted(line.requests, key=_key), "held requests are out of order"
        assert all(request.is_returning for request in self._returning.requests), "a fresh one among the returning"
        for tenant, line in self._fresh.items():
            assert line.requests, "a line of nobody"
            assert all(r.tenant == tenant and not r.is_returning for r in line.requests), "in the wrong line"

    def _outranked(self, order_key: OrderKey, line: _Line) -> Tracked | None:
        """A look at the very last is not enough: it may be as urgent and only younger, where the key is that of a
        request which was shed and is old itself.
        """
        value = self.value(order_key)
        for request in reversed(line.requests):
            if request.held_key[0] <= value:
                return None
            if self.outranks(order_key, request.priority, request.held_key[0]):
                return request
        return None
