"""PURE. The permits that a router has of one replica, and what it asks for: the other half of `replica/permits.py`.

Nothing is kept in stock: a permit is spent at once on a held request, or goes back. An idle stock would be a place that
nobody can take, and a submission that needs none is as quick.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.messages import Ask, Grant, Permit, Wish

#: an ask or its grant was lost with something: say it again
ASK_AGAIN_S = 1.0


class PermitStock:
    """Those for one tenant. Totals are those of a term; a new term begins with nothing."""

    __slots__ = ("_asked", "_asked_at", "_gave_back_at", "_granted", "_number", "_tenant", "_term", "_used")

    def __init__(self, tenant: str = "") -> None:
        self._tenant = tenant
        self._term = self._granted = self._used = self._number = 0
        #: wishes of the last ask that were not granted yet
        self._asked: list[Wish] = []
        self._asked_at = float("-inf")
        #: the replica's news when permits went back without a use: asking again before the next would be a loop
        self._gave_back_at = -1

    @property
    def num_available(self) -> int:
        return self._granted - self._used

    def hear(self, grant: Grant) -> None:
        """A grant came; older ones than the last are nothing new."""
        if grant.term < self._term:
            return
        if grant.term > self._term:
            self._term, self._granted, self._used = grant.term, 0, 0
        news = grant.granted - self._granted
        self._granted = max(self._granted, grant.granted)
        while self._asked and news >= self._asked[0].num_sequences:
            news -= self._asked.pop(0).num_sequences

    def spend(self, num_sequences: int) -> Permit | None:
        """For a submission: a permit if there are enough, else None."""
        if not 0 < num_sequences <= self.num_available:
            return None
        self._used += num_sequences
        return Permit(self._term, self._used)

    def has_news(self, first: Wish | None, num_news: int, now: float) -> bool:
        """Whether `next_ask` would tell anything, if `first` is the first of the wishes; None: there are none."""
        if self.num_available:
            return True
        return first is not None and num_news != self._gave_back_at and self._is_news(first, now)

    def next_ask(self, wishes: Sequence[Wish], num_news: int, now: float, weight: float = 1.0) -> Ask | None:
        """What to tell the replica, if there is anything to tell: what is left over goes back, and who is held now (in
        their order) is wished a place. `num_news` counts the messages that the replica's load came with.
        """
        if self.num_available:
            self._used = self._granted
            self._gave_back_at = num_news
            return self._ask((), now, weight)
        if wishes and num_news != self._gave_back_at and self._is_news(wishes[0], now):
            return self._ask(wishes, now, weight)
        return None

    def _is_news(self, first: Wish, now: float) -> bool:
        if not self._asked or now - self._asked_at >= ASK_AGAIN_S:
            return True
        return first.value < self._asked[0].value

    def _ask(self, wishes: Sequence[Wish], now: float, weight: float) -> Ask:
        self._number += 1
        self._asked = list(wishes)
        self._asked_at = now
        return Ask(self._number, self._term, self._used, self._asked.copy(), self._tenant, weight)


class PermitStocks:
    """Of one replica, by tenant."""

    __slots__ = ("_stocks",)

    def __init__(self) -> None:
        self._stocks: dict[str, PermitStock] = {}

    def of(self, tenant: str) -> PermitStock:
        """Its stock; an empty one if there was none."""
        stock = self._stocks.get(tenant)
        if stock is None:
            stock = self._stocks[tenant] = PermitStock(tenant)
        return stock

    def num_available(self, tenant: str) -> int:
        stock = self._stocks.get(tenant)
        return 0 if stock is None else stock.num_available

    def spend(self, tenant: str, num_sequences: int) -> Permit | None:
        """As `PermitStock.spend`."""
        stock = self._stocks.get(tenant)
        return None if stock is None else stock.spend(num_sequences)

    def tenants(self) -> list[str]:
        """Those that were ever asked for."""
        return list(self._stocks)
