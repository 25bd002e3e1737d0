"""PURE. Places in the batch by tenant: whether a waiting sequence may take the place of one that runs.

The rule is that of the queue (`replica/places.py`): a tenant takes a place of another that has at least as many for its
weight afterwards. So no exchange is undone by the next, a tenant alone may have all places, and one that uses little
waits for nobody's answer to end: its next sequence joins with the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from replica.running_set import RunningSet
from replica.sequence import Sequence


class SeatShares:
    """Looks at who runs; decides about pairs of tenants. Between sequences of one tenant nothing is decided."""

    def __init__(self, running: RunningSet) -> None:
        self._running = running

    def is_uneven(self, waiting: Mapping[str, float]) -> bool:
        """Somebody who waits may take a place, as far as counts go. `waiting`: tenant -> weight, of all who wait."""
        counts = self._running.tenants
        if len(counts) == 1 and waiting.keys() == counts.keys():
            return False
        least = min(((counts.get(tenant, 0) + 1) / weight for tenant, weight in waiting.items()), default=float("inf"))
        weights = self._running.weights
        return any((count - 1) / weights[tenant] >= least for tenant, count in counts.items())

    def goes_before(self, queued: Sequence, returning: Sequence) -> bool:
        """A queued one before a returning one: with it, its tenant has no more than the other has now."""
        if queued.tenant == returning.tenant:
            return False
        counts = self._running.tenants
        own = (counts.get(queued.tenant, 0) + 1) / queued.tenant_weight
        return own <= counts.get(returning.tenant, 0) / returning.tenant_weight

    def givers(self, taker: Sequence) -> Iterator[Sequence]:
        """Who has to make way for `taker`, one after the other: of the tenant that has most for its weight the one
        admitted last, as long as that one has as many as the taker's would.
        """
        counts, weights = dict(self._running.tenants), self._running.weights
        own = (counts.pop(taker.tenant, 0) + 1) / taker.tenant_weight
        left = {tenant: [s for s in self._running if s.tenant == tenant] for tenant in counts}
        while counts:
            tenant = max(counts, key=lambda name: (counts[name] - 1) / weights[name])
            if (counts[tenant] - 1) / weights[tenant] < own:
                return
            if left[tenant]:
                yield left[tenant].pop()
                counts[tenant] -= 1
            else:
                del counts[tenant]
