"""PURE. Who enters a full queue next: the replica reserves places for routers that hold requests, as permits.

    router                                   replica
    holds a request, sees no room ──ask────> the wish lies at the desk, in one order with those of other routers
                                   <─grant── a place is free: the permit reserves it, queued + permits <= cap
    sends the request with it ─────submit──> the place is taken (what is of no use goes back with the next ask)

While there is room nobody needs a permit: a submission is its own question, and costs no more than an ask would.

Permits are counted as totals of a term, never as differences, so a message that comes twice, late or not at all makes
no permit out of nothing: outstanding is what was granted in the term minus what the router has parted with in it. Of a
router that is not heard for a lease, the term ends: what is outstanding comes back here, and whatever it still spends
of that term is worth nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from replica.messages import Ask, Grant, Permit, RouterId, Wish

#: a router spends or gives back what it gets within a round trip; one that was frozen keeps places from others so long
LEASE_S = 2.0


class _Holder:
    """What one router has and wants."""

    __slots__ = ("ask_number", "granted", "lease_until", "term", "used", "wishes")

    def __init__(self, term: int) -> None:
        self.term = term
        self.granted = self.used = 0
        self.ask_number = -1
        self.wishes: list[Wish] = []
        self.lease_until = 0.0

    @property
    def outstanding(self) -> int:
        return self.granted - self.used


class PermitDesk:
    """Of one replica. Places are counted in sequences; how many are free it is told."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._holders: dict[RouterId, _Holder] = {}
        self._last_term = 0

    @property
    def num_outstanding(self) -> int:
        """Places that are reserved."""
        return sum(holder.outstanding for holder in self._holders.values())

    @property
    def first_wish(self) -> Wish | None:
        """Whoever has no permit may not pass it."""
        return min((h.wishes[0] for h in self._holders.values() if h.wishes), key=_turn, default=None)

    def ask(self, router_id: RouterId, ask: Ask) -> None:
        """A router says what it has parted with, and what it wants from now on; an ask that was overtaken by a later
        one wants nothing.
        """
        holder = self._holders.get(router_id)
        if holder is None:
            holder = self._holders[router_id] = _Holder(self._next_term())
        self._settle(holder, ask.term, ask.used)
        if ask.number > holder.ask_number:
            holder.ask_number = ask.number
            holder.wishes = sorted(ask.wishes, key=_turn)

    def redeem(self, router_id: RouterId, permit: Permit | None, num_sequences: int) -> int:
        """A submission came. For how many of its sequences places were reserved; they are not any more."""
        holder = self._holders.get(router_id)
        if permit is None or holder is None:
            return 0
        return min(num_sequences, self._settle(holder, permit.term, permit.used))

    def deal(self, num_free: int, cap: int, now: float) -> dict[RouterId, Grant]:
        """Reserve what is free (`num_free`: places neither taken nor, as far as that matters here, reserved) for those
        who wait, in their order. Whole requests only: two halves of a request in two routers would wait for each other.
        """
        granted: dict[RouterId, Grant] = {}
        if not self._holders:
            return granted
        self._end_leases(now)
        left = num_free - self.num_outstanding
        for router_id, holder in self._by_turn():
            while holder.wishes and holder.wishes[0].num_sequences > cap:
                holder.wishes.pop(0)  # the cap was lowered: the router is told so when it submits
            if not holder.wishes:
                continue
            wish = holder.wishes[0]
            if wish.num_sequences > left:
                break
            holder.wishes.pop(0)
            left -= wish.num_sequences
            holder.granted += wish.num_sequences
            holder.lease_until = now + self._lease_s
            granted[router_id] = Grant(holder.term, holder.granted)
        return granted

    def forget(self, router_id: RouterId) -> None:
        """Its stream is gone, and with it what it held."""
        self._holders.pop(router_id, None)

    def validate(self) -> None:
        """Raises AssertionError if a router has parted with more than it was given."""
        for router_id, holder in self._holders.items():
            assert 0 <= holder.used <= holder.granted, f"{router_id}: {holder.used} of {holder.granted} permits used"
            assert holder.wishes == sorted(holder.wishes, key=_turn), f"{router_id}: wishes are out of order"

    # ---- inside ----

    def _by_turn(self) -> Iterator[tuple[RouterId, _Holder]]:
        """Again and again whoever has the first wish, until nobody has one."""
        while waiting := [item for item in self._holders.items() if item[1].wishes]:
            yield min(waiting, key=lambda item: _turn(item[1].wishes[0]))

    def _settle(self, holder: _Holder, term: int, used: int) -> int:
        """What the router has parted with since it was last heard; more than it was given is not believed."""
        if term != holder.term:
            return 0
        news = max(0, min(used, holder.granted) - holder.used)
        holder.used += news
        return news

    def _end_leases(self, now: float) -> None:
        for holder in self._holders.values():
            if holder.outstanding and holder.lease_until <= now:
                holder.term = self._next_term()
                holder.granted = holder.used = 0
                holder.wishes.clear()

    def _next_term(self) -> int:
        self._last_term += 1
        return self._last_term


def _turn(wish: Wish) -> tuple[float, float]:
    return (wish.turn, wish.value)
