"""PURE. Who enters a full queue next: the replica reserves places for routers that hold requests, as permits.

    router                                   replica
    holds a request, sees no room ──ask────> the wish lies at the desk, in one order with those of other routers
                                   <─grant── a place is free: the permit reserves it, queued + permits <= cap
    sends the request with it ─────submit──> the place is taken (what is of no use goes back with the next ask)

While there is room nobody needs a permit: a submission is its own question, and costs no more than an ask would.

A permit is for one tenant: the place was taken from others for it (`replica/places.py`).

Permits are counted as totals of a term, never as differences, so a message that comes twice, late or not at all makes
no permit out of nothing: outstanding is what was granted in the term minus what the router has parted with in it. Of a
router that is not heard for a lease, the term ends: what is outstanding comes back here, and whatever it still spends
of that term is worth nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from replica.messages import Ask, Grant, Permit, RouterId, Wish
from replica.places import Places

#: a router spends or gives back what it gets within a round trip; one that was frozen keeps places from others so long
LEASE_S = 2.0


class _Holder:
    """What one router has and wants for one tenant."""

    __slots__ = ("ask_number", "granted", "lease_until", "tenant", "term", "used", "weight", "wishes")

    def __init__(self, tenant: str, term: int) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.term = term
        self.granted = self.used = 0
        self.ask_number = -1
        self.wishes: list[Wish] = []
        self.lease_until = 0.0

    @property
    def outstanding(self) -> int:
        return self.granted - self.used


class First(NamedTuple):
    """Whose turn it is among those who wait."""

    router_id: RouterId
    wish: Wish
    tenant: str
    weight: float


class PermitDesk:
    """Of one replica. Places are counted in sequences; how many are free it is told."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._holders: dict[tuple[RouterId, str], _Holder] = {}
        self._last_term = 0

    @property
    def num_outstanding(self) -> int:
        """Places that are reserved."""
        return sum(holder.outstanding for holder in self._holders.values())

    @property
    def has_wishes(self) -> bool:
        """Somebody waits."""
        return any(holder.wishes for holder in self._holders.values())

    def first(self, places: Places, cap: int) -> First | None:
        """Whose turn it is: nobody without a permit may pass it. A wish beyond the cap, which was lowered, holds nobody
        up: who submits it is told.
        """
        firsts = [
            First(router_id, wish, holder.tenant, holder.weight)
            for (router_id, _), holder in self._holders.items()
            if (wish := next((w for w in holder.wishes if w.num_sequences <= cap), None)) is not None
        ]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        return min(firsts, key=lambda first: (places.share(first.tenant, first.weight), first.wish.value))

    def ask(self, router_id: RouterId, ask: Ask) -> None:
        """A router says what it has parted with, and what it wants from now on; an ask that was overtaken by a later
        one wants nothing.
        """
        key = (router_id, ask.tenant)
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = _Holder(ask.tenant, self._next_term())
        self._settle(holder, ask.term, ask.used)
        if ask.number > holder.ask_number:
            holder.ask_number = ask.number
            holder.weight = ask.tenant_weight
            holder.wishes = sorted(ask.wishes, key=lambda wish: wish.value)

    def redeem(self, router_id: RouterId, tenant: str, permit: Permit | None, num_sequences: int) -> int:
        """A submission came. For how many of its sequences places were reserved; they are not any more."""
        holder = self._holders.get((router_id, tenant))
        if permit is None or holder is None:
            return 0
        return min(num_sequences, self._settle(holder, permit.term, permit.used))

    def deal(self, num_free: int, cap: int, places: Places, now: float) -> list[tuple[RouterId, Grant]]:
        """Reserve what is free (`num_free`: places that are not taken) for those who wait, in their order. Whole
        requests only: two halves of a request in two routers would wait for each other. What is dealt is added to
        `places`.
        """
        granted: dict[tuple[RouterId, str], Grant] = {}
        self.end_leases(now)
        left = num_free - self.num_outstanding
        while left > 0 and (first := self.first(places, cap)) is not None and first.wish.num_sequences <= left:
            key = (first.router_id, first.tenant)
            holder, num_sequences = self._holders[key], first.wish.num_sequences
            holder.wishes.remove(first.wish)
            left -= num_sequences
            places.take(first.tenant, num_sequences)
            holder.granted += num_sequences
            holder.lease_until = now + self._lease_s
            granted[key] = Grant(holder.term, holder.granted, holder.tenant)
        return [(router_id, grant) for (router_id, _), grant in granted.items()]

    def end_leases(self, now: float) -> None:
        """Take back what routers have kept for too long."""
        for holder in self._holders.values():
            if holder.outstanding and holder.lease_until <= now:
                holder.term = self._next_term()
                holder.granted = holder.used = 0
                holder.wishes.clear()

    def reserved(self) -> Counter[str]:
        """Places that are reserved, by tenant."""
        counts: Counter[str] = Counter()
        for holder in self._holders.values():
            counts[holder.tenant] += holder.outstanding
        return counts

    def forget(self, router_id: RouterId) -> None:
        """Its stream is gone, and with it what it held."""
        for key in [key for key in self._holders if key[0] == router_id]:
            del self._holders[key]

    def validate(self) -> None:
        """Raises AssertionError if a router has parted with more than it was given."""
        for key, holder in self._holders.items():
            assert 0 <= holder.used <= holder.granted, f"{key}: {holder.used} of {holder.granted} permits used"

    # ---- inside ----

    def _settle(self, holder: _Holder, term: int, used: int) -> int:
        """What the router has parted with since it was last heard; more than it was given is not believed."""
        if term != holder.term:
            return 0
        news = max(0, min(used, holder.granted) - holder.used)
        holder.used += news
        return news

    def _next_term(self) -> int:
        self._last_term += 1
        return self._last_term
