"""PURE. Where a request may be sent now: by what replicas said of their queues, refused lately or reserved for us."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replica.messages import Ask, OrderKey, RefusalReason
from router.held_requests import HeldRequests
from router.placement import Policy
from router.refusals import Demand
from router.replica_view import ReplicaView
from router.tracked import Tracked

#: a replica is told of so many held requests of a tenant at once: as many as may be let in between two messages of it
_MAX_WISHES = 8


class Eligibility:
    """Looks at views and at who else is held; changes neither."""

    def __init__(self, held: HeldRequests) -> None:
        self._held = held

    def choose(self, request: Tracked, views: Iterable[ReplicaView], policy: Policy, now: float) -> ReplicaView | None:
        """The policy's choice among those that may get it, or None."""
        askable = [view for view in views if self.may_send(request, view)]
        candidates = [view for view in askable if view.is_placeable(now)]
        if not request.is_returning:  # nobody is pushed out while there is room elsewhere
            candidates = [v for v in candidates if v.has_room_for(request.num_sequences, request.tenant)] or candidates
        candidates = candidates or [view for view in askable if request.is_returning and view.takes_back(now)]
        return policy(candidates) if candidates else None

    def may_send(self, request: Tracked, view: ReplicaView) -> bool:
        """As far as its queue is concerned."""
        has_permits = not request.is_returning and view.permits.num_available(request.tenant) >= request.num_sequences
        if request.tried.get(view.replica_id) == view.num_news and not has_permits:
            return False
        if request.is_returning:
            return True
        demand, window = self._demand(request), view.refusals.window
        if view.refusals.is_shed(demand):
            return False
        if not view.has_room_for(request.num_sequences, request.tenant):
            # one at a time: whoever is let in takes the place that the next one counts on
            window = 1
            if view.refusals.is_full_for(demand) or not self.may_displace(
                request.order_key, request.num_sequences, view
            ):
                return False
        return window is None or view.unanswered_sequences < window or self._is_alone(request)

    def may_displace(self, order_key: OrderKey, num_sequences: int, view: ReplicaView) -> bool:
        """Believed: a full queue has somebody whose place it may take. The replica decides."""
        last = view.load.last_queued
        return last is not None and num_sequences <= view.load.queue_cap and self._held.outranks(order_key, *last)

    def may_wish(self, request: Tracked, view: ReplicaView) -> bool:
        """A place there would be of use to it."""
        return request.num_sequences <= view.load.queue_cap and not view.refusals.is_shed(self._demand(request))

    def asks(self, view: ReplicaView, now: float) -> Iterator[Ask]:
        """What to tell the replica of permits and of who is held."""
        for tenant in {*self._held.tenants(), *view.permits.tenants()}:
            waiting, weight = self._held.first_of(tenant, _MAX_WISHES)
            stock = view.permits.of(tenant)
            first = next((request for request in waiting if self.may_wish(request, view)), None)
            if not stock.has_news(None if first is None else self._held.wish(first), view.num_news, now):
                continue
            wishes = [self._held.wish(request) for request in waiting if self.may_wish(request, view)]
            if (ask := stock.next_ask(wishes, view.num_news, now, weight)) is not None:
                yield ask

    def refused(self, request: Tracked, view: ReplicaView, reason: RefusalReason) -> None:
        """Remember what it may not be sent to before there is news."""
        request.tried[view.replica_id] = view.num_news
        view.refusals.refused(self._demand(request), reason)

    def _is_alone(self, request: Tracked) -> bool:
        """Nobody else is held. Who comes then is tried at once, for there may be no time to hold it at all."""
        return len(self._held) == (request in self._held)

    def _demand(self, request: Tracked) -> Demand:
        value = self._held.value(request.order_key)
        return Demand(request.num_sequences, request.num_tokens, request.priority, value)
