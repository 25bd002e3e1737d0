"""PURE. The way into the queue: places taken, places reserved, and never more of both than the cap."""

from __future__ import annotations

from replica.messages import Ask, GenerateRequest, Grant, Permit, RouterId
from replica.permits import PermitDesk
from replica.places import Places
from replica.sequence import Sequence
from replica.shedding import Shedding


class QueueGate:
    """Permits beside the queue of which `Shedding` knows the members and the cap."""

    def __init__(self, shedding: Shedding) -> None:
        self._shedding = shedding
        self._permits = PermitDesk()
        #: more may not be taken: the cap, or what was taken already when it was lowered
        self._most_taken = shedding.cap

    @property
    def num_permits(self) -> int:
        """Places that are reserved."""
        return self._permits.num_outstanding

    @property
    def num_taken(self) -> int:
        """Places that are taken or reserved."""
        return self._shedding.num_queued + self.num_permits

    def configure(self, shedding: Shedding) -> None:
        """Nobody has to leave: above a lowered cap nobody comes in until enough have left."""
        self._shedding = shedding
        self._most_taken = max(shedding.cap, self.num_taken)

    def redeem(self, router_id: RouterId, request: GenerateRequest, permit: Permit | None) -> bool:
        """A submission came: True if places were reserved for all of it, and still were. They are free now."""
        self._most_taken = max(self._shedding.cap, min(self._most_taken, self.num_taken))
        num_sequences = len(request.sequences)
        return self._permits.redeem(router_id, request.tenant, permit, num_sequences) == num_sequences

    def make_room(self, request: GenerateRequest, seq_id: int, has_places: bool) -> list[Sequence]:
        """Who has to end so that the request may be queued. Raises Refused. `has_places`: what `redeem` said."""
        first = places = None
        if not has_places and self._permits.has_wishes:
            places = self._places()
            first = self._permits.first(places, self._shedding.cap)
        return self._shedding.make_room(request, seq_id, self.num_permits, first, places)

    def ask(self, router_id: RouterId, ask: Ask) -> None:
        """A router gives back permits, and says who waits there: `make_way` and `deal` answer."""
        self._permits.ask(router_id, ask)

    def make_way(self) -> list[Sequence]:
        """Who has to end so that the first of those who wait may have a place, where tenants share a full queue; call
        again when they have ended, and then `deal`.
        """
        if not self._permits.has_wishes:
            return []
        places = self._places()
        first = self._permits.first(places, self._shedding.cap)
        if first is None or first.wish.num_sequences <= self._shedding.cap - self.num_taken:
            return []
        return self._shedding.make_way(first, places) if places.has_others(first.tenant) else []

    def deal(self, is_open: bool, now: float) -> list[tuple[RouterId, Grant]]:
        """Reserve what is free for requests that routers hold."""
        if not self._permits.has_wishes:  # so it is at nearly every call: nothing is counted for it
            self._permits.end_leases(now)
            return []
        num_free = self._shedding.cap - self._shedding.num_queued if is_open else 0
        return self._permits.deal(num_free, self._shedding.cap, self._places(), now)

    def forget(self, router_id: RouterId) -> None:
        """The router is gone: its permits are free."""
        self._permits.forget(router_id)

    def _places(self) -> Places:
        return Places(self._shedding.num_queued_by_tenant() + self._permits.reserved())

    def validate(self) -> None:
        """Raises AssertionError if more is taken than may be."""
        self._permits.validate()
        assert self.num_taken <= self._most_taken, (
            f"{self._shedding.num_queued} queued and {self.num_permits} reserved, "
            f"cap {self._shedding.cap}, allowed {self._most_taken}"
        )
