"""PURE. The bound on what waits in the whole application: `router.max_num_queued_reqs`.

Each router has its part of it, and counts the sequences of its own requests that have no token yet, wherever they are:
held here, on their way, or in a replica's queue. What a router counts is never less than what it has there, so all
together are never above the bound, and no router has to ask another one. A request that is sent elsewhere after a loss
goes on counting, and is never refused for it.
"""

from __future__ import annotations

from collections import Counter

from replica.messages import OrderKey, RequestId
from router.held_requests import HeldRequests
from router.tracked import Tracked


class Waiting:
    """Of one router, in sequences. `held` knows the order of the policy."""

    def __init__(self, held: HeldRequests, most: int | None) -> None:
        self._held = held
        #: this router's part of the bound; None: there is none
        self.most = most
        self.num_sequences = 0
        self._requests: dict[RequestId, Tracked] = {}
        #: of each request, which sequences have begun
        self._begun: dict[RequestId, set[int]] = {}
        self._by_tenant: Counter[str] = Counter()

    def add(self, request: Tracked) -> None:
        """A fresh one."""
        self._requests[request.request_id] = request
        self._begun[request.request_id] = set()
        self._count(request, request.num_sequences)

    def began(self, request_id: RequestId, index: int) -> None:
        """A sequence has its first token, or its end. Idempotent."""
        request = self._requests.get(request_id)
        if request is None or index in (begun := self._begun[request_id]):
            return
        begun.add(index)
        self._count(request, -1)
        if len(begun) == request.num_sequences:
            self._drop(request_id)

    def discard(self, request: Tracked) -> None:
        """It ended. Idempotent."""
        begun = self._begun.get(request.request_id)
        if begun is not None:
            self._count(request, len(begun) - request.num_sequences)
            self._drop(request.request_id)

    def has_room_for(self, num_sequences: int) -> bool:
        return self.most is None or self.num_sequences + num_sequences <= self.most

    def is_too_many(self, num_sequences: int) -> bool:
        """One request may never have so many."""
        return self.most is not None and num_sequences > self.most

    def who_makes_way(self, num_sequences: int, order_key: OrderKey, tenant: str, weight: float) -> list[Tracked]:
        """Who has to leave so that a fresh request of this key may come in; nobody: it may not.

        Of those of which nothing has begun: requests of its own tenant that it outranks, the last in order first; else
        the last one of the tenant that has the most for its weight, if that has as many still as the newcomer's then.
        """
        assert self.most is not None
        wanted = self.num_sequences + num_sequences - self.most
        own = self._untouched(tenant) if self._held.has_classes else []
        leaving: list[Tracked] = []
        for request in own:
            if wanted <= 0 or not self._held.outranks(order_key, request.priority, self._held.value(request.order_key)):
                break
            leaving.append(request)
            wanted -= request.num_sequences
        if wanted <= 0:
            return leaving
        return self._of_the_largest(wanted, (self._by_tenant[tenant] + num_sequences) / weight, tenant)

    def _of_the_largest(self, wanted: int, share: float, tenant: str) -> list[Tracked]:
        """The last requests of another tenant, `wanted` sequences at least, so that it keeps `share` for its weight."""
        best: list[Tracked] = []
        most = share
        for name, count in self._by_tenant.items():
            if name == tenant or count <= 0:
                continue
            leaving: list[Tracked] = []
            left = wanted
            for request in self._untouched(name):
                if left <= 0:
                    break
                leaving.append(request)
                left -= request.num_sequences
            if left > 0:
                continue
            kept = (count - sum(r.num_sequences for r in leaving)) / leaving[0].tenant_weight
            if kept >= most:
                best, most = leaving, kept
        return best

    def _untouched(self, tenant: str) -> list[Tracked]:
        """Its requests that nothing has begun of, the last in order first."""
        found = [
            request
            for request_id, request in self._requests.items()
            if request.tenant == tenant and not self._begun[request_id] and not request.is_returning
        ]
        return sorted(found, key=lambda request: self._held.value(request.order_key), reverse=True)

    def _count(self, request: Tracked, change: int) -> None:
        self.num_sequences += change
        self._by_tenant[request.tenant] += change
        if not self._by_tenant[request.tenant]:
            del self._by_tenant[request.tenant]

    def _drop(self, request_id: RequestId) -> None:
        del self._requests[request_id], self._begun[request_id]

    def validate(self) -> None:
        """Raises AssertionError if the count is not that of its members."""
        left = [r.num_sequences - len(self._begun[request_id]) for request_id, r in self._requests.items()]
        assert all(number > 0 for number in left), "somebody waits who has begun"
        assert self.num_sequences == sum(left) == sum(self._by_tenant.values()), "waiting"
